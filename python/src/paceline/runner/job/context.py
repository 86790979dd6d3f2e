"""The place of a rank among its peers, the process that started it, and its environment."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.processes import command_line_of, parent_of, process_started_unix_s
from paceline.plan.spec.extensions import LAUNCHERS
from paceline.plan.trials.rank_context import RankContext, StoreAddress
from paceline.plan.trials.trial import Trial


def rank_context(rank: int, hosts: Sequence[str], store: StoreAddress | None) -> RankContext:
    """Return the context of `rank`. Call it in the process of that rank.

    hosts: the host of every rank, by rank. store: the address where rank 0 listens.
    """
    host = hosts[rank]
    return RankContext(
        rank=rank,
        world_size=len(hosts),
        local_rank=list(hosts[:rank]).count(host),
        ranks_on_node=list(hosts).count(host),
        node_index=list(dict.fromkeys(hosts)).index(host),
        host=host,
        process_started_unix_s=own_start_unix_s(),
        store=store if len(hosts) > 1 else None,
    )


def nodes_of(hosts: Sequence[str], advice: str) -> list[str]:
    """Return the nodes in the order of their first ranks.

    Raises EnvironmentLacks, with `advice`, if the nodes have different numbers of ranks.
    """
    counts = {node: list(hosts).count(node) for node in dict.fromkeys(hosts)}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{node}: {count}" for node, count in counts.items())
        raise EnvironmentLacks(f"expected as many ranks on every node, got {listed}; {advice}")
    return list(counts)


def own_start_unix_s() -> float:
    """Return when this process started."""
    return process_started_unix_s(os.getpid()) or time.time()


# The runner sets it to the name of its own host, where it starts the sidecar itself.
SIDECAR_HOST_VARIABLE = "PACELINE_SIDECAR_HOST"
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def rank_environment(trial: Trial) -> dict[str, str]:
    """Return the sizes of thread pools for every rank, the setting for unbuffered output, and the
    trial's own variables."""
    threads = str(trial.placement.threads_per_worker)  # a replica has a pool of its own
    return {
        **dict.fromkeys(THREAD_VARIABLES, threads),
        "OMP_DYNAMIC": "FALSE",
        "PYTHONUNBUFFERED": "1",
        **trial.environment,
    }


_TASK_OF_SLURM = "slurmstepd"  # the parent of what srun starts


def is_launcher(pid: int) -> bool:
    """Return whether a process runs a launcher's program, which starts ranks and is none."""
    # three words, because of `python -m torch.distributed.run`
    names = {word.rpartition("/")[2] for word in command_line_of(pid)[:3]}
    return any(names & launcher.programs for launcher in LAUNCHERS.all())


def launching_pid() -> int:
    """Return the process that the user started: the parent if it is a launcher's program.

    If the parent is another program, such as a shell, the user started this process itself.
    """
    parent = parent_of(os.getpid())
    return os.getpid() if parent is None or not is_launcher(parent) else parent


def launched_unix_s() -> float:
    """Return when that process was started."""
    started = process_started_unix_s(launching_pid())
    return time.time() if started is None else started


def check_started_once(environment: Mapping[str, str] = os.environ) -> None:
    """Raise EnvironmentLacks if srun started several copies of a command that starts all ranks.

    Each copy would run the whole trial in the same run directory.
    """
    copies = environment.get("SLURM_STEP_NUM_TASKS", "1")
    parent = parent_of(launching_pid())
    words = [] if parent is None else command_line_of(parent)
    if not (copies.isdigit() and int(copies) > 1 and words):
        return
    # A shell of `srun --pty` has these variables too, but starts the command once.
    if words[0].startswith(_TASK_OF_SLURM):
        raise EnvironmentLacks(
            f"srun started {copies} copies of this command (SLURM_STEP_NUM_TASKS), and each would "
            "run the whole trial. Start it once (srun --ntasks 1, or without srun), or use "
            'launcher "mpi", whose ranks srun --mpi=pmix starts'
        )
