"""The place of a rank among its peers, the process that started it, and its environment."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.machine import THREAD_VARIABLES
from paceline.base.host.processes import command_line_of, parent_of, process_started_unix_s
from paceline.base.host.programs import SAFE_PATH_VARIABLE
from paceline.collectives.host import Process
from paceline.plan.spec.extensions import LAUNCHERS
from paceline.plan.trials.trial import RankContext, StoreAddress, Trial
from paceline.train.data.remote_folder import url_below


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


def rank_environment(trial: Trial) -> dict[str, str]:
    """Return the sizes of thread pools for every rank, settings of Python, and the trial's own
    variables."""
    threads = str(trial.placement.threads_per_worker)  # a replica has a pool of its own
    return {
        **dict.fromkeys(THREAD_VARIABLES, threads),
        "OMP_DYNAMIC": "FALSE",
        "PYTHONUNBUFFERED": "1",
        SAFE_PATH_VARIABLE: "1",
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


# The remote place through which nodes without shared storage exchange the files of an attempt
#
#     URL/nodes/replay/…                     states of the baseline, which trials replay
#     URL/nodes/ATTEMPT/trial/…              trial.json, and the file of a task
#     URL/nodes/ATTEMPT/hosts/HOST/          made by a node at its start, before its records
#     URL/nodes/ATTEMPT/hosts/HOST/files/…   the node's folder of the trial
#     URL/nodes/ATTEMPT/hosts/HOST/done/     made when all of them are there
#
# URL is the place of the whole run's copy, whose end removes `nodes`.

_VARIABLE = "PACELINE_PLACE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePlace:
    """The place of one attempt at a trial."""

    url: str  # of the run
    attempt: str  # a name that no other attempt has

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> RemotePlace | None:
        text = environment.get(_VARIABLE)
        if text is None:
            return None
        attempt, _, url = text.partition(" ")
        return cls(url=url, attempt=attempt)

    def environment(self) -> dict[str, str]:
        """Return the variable from which the job side reads this back."""
        # Without quotes, which the shell scripts of YARN do not escape.
        return {_VARIABLE: f"{self.attempt} {self.url}"}

    @property
    def replay(self) -> str:
        return url_below(self.url, "nodes", "replay")

    @property
    def trial(self) -> str:
        return url_below(self.url, "nodes", self.attempt, "trial")

    @property
    def hosts(self) -> str:
        return url_below(self.url, "nodes", self.attempt, "hosts")

    def host(self, name: str, *folders: str) -> str:
        return url_below(self.hosts, name, *folders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The work of the process that delivers the records of a node."""

    place: RemotePlace
    host: str
    folder: str  # of this node, removed when its records are sent
    trial_root: str  # in the folder
    ranks: int  # of this node
    first_rank: Process
    limit_s: float  # until the ranks have ended

    @property
    def log(self) -> Path:
        return Path(self.folder, "delivery.log")
