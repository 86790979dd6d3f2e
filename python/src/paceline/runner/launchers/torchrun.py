"""`torchrun`: PyTorch's own launcher as a reference, on one node.

`torchrun … -m paceline.runner.launchers.torchrun` is one rank that torchrun started. Its place
comes from torchrun's variables. torchrun also provides MASTER_ADDR and MASTER_PORT, but a store
there listens on every interface. So rank 0 binds a socket of its own and writes the address to a
file in the trial's directory.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.base.host.programs import MachineFinding, Tool, tool_finding
from paceline.collectives.host import host_name
from paceline.measure.records.layout import TrialFiles
from paceline.plan.trials.trial import Trial
from paceline.runner.job import (
    Job,
    StoreAddress,
    check_started_once,
    finish,
    listen_on,
    parse_job,
    prepare,
    rank_context,
    run_guarded,
    run_rank,
)
from paceline.runner.job.context import launching_pid, rank_environment
from paceline.runner.job.job import check_world, exchange_address
from paceline.runner.launchers.base import (
    Command,
    TemporaryFolders,
    first_named,
    shared_memory_of_mpi,
)
from paceline.runner.preflight.this_host import check_trial

# Files of a scheduler are rendered by the command side; a rank does not load what renders them.
if TYPE_CHECKING:
    from paceline.runner.launchers.schedulers.kubernetes import KubernetesSettings
    from paceline.runner.launchers.schedulers.slurm import SlurmSettings, SlurmStep

_FAILURES = (
    re.compile(r"Root Cause.*?rank\s*:\s*(\d+)", re.DOTALL),
    re.compile(r"failed \(exitcode: [^)]*\) local_rank: (\d+)"),
)
# Otherwise the agent opens a store for the workers to share, on every interface.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_MODULE = ["-m", "paceline.runner.launchers.torchrun"]
_PROG = "python -m paceline.runner.launchers.torchrun"


class TorchrunLauncher:
    """`python -m torch.distributed.run` with a rendezvous over a file instead of a port.

    With a port, the agent's TCPStore would listen on every interface (pytorch/pytorch#173909).
    """

    def preflight(self, trial: Trial) -> None:
        find_torchrun()
        check_trial(trial)

    def command(self, trial: Trial, files: TrialFiles) -> Command:
        rendezvous = files.root.resolve() / "torchrun.rendezvous"
        rendezvous.unlink(missing_ok=True)  # of an attempt that was stopped
        argv = [str(find_torchrun().path), *agent_arguments(trial, trial.id, str(rendezvous))]
        argv += [*_MODULE, "--trial", str(files.trial)]
        environment = {**rank_environment(trial), **ENVIRONMENT}
        return Command(argv=tuple(argv), environment=environment, temporary=_temporary)

    def failed_rank(self, log_text: str) -> int | None:
        return first_named(_FAILURES, log_text)


def _temporary(folders: TemporaryFolders) -> dict[str, str]:
    """Return the variables for temporary files; the agent leaves a folder for logs otherwise."""
    return {**shared_memory_of_mpi(folders), "PET_LOG_DIR": str(folders.disk)}  # --log-dir


def agent_arguments(trial: Trial, run_id: str, rendezvous: str) -> list[str]:
    """Return the interpreter's arguments for torchrun; rendezvous: path of a file."""
    return [
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={trial.placement.ranks}",
        f"--max-restarts={trial.restarts}",
        f"--rdzv-id={run_id}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rendezvous}",
        "--rdzv-conf=store_type=file",
        "--local-addr=127.0.0.1",
    ]


def find_torchrun() -> Tool:
    """Return this Python, which runs torchrun as a module.

    Raises EnvironmentLacks if torch is not installed.
    """
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError as error:
        raise EnvironmentLacks(
            f"torchrun: expected torch in {sys.prefix}, found none; `pip install torch` brings it"
        ) from error
    return Tool(path=Path(sys.executable), version=version, why="torch of this Python")


def checks() -> list[MachineFinding]:
    """Return what `paceline doctor` shows about this launcher."""
    return [tool_finding("torchrun", find_torchrun)]


def slurm_step(trial: Trial, settings: SlurmSettings) -> SlurmStep:
    """Return one task, torchrun's agent, that starts all ranks."""
    from paceline.runner.launchers.schedulers.slurm import SlurmStep  # noqa: PLC0415

    # torch unpickles the file of the rendezvous, so only this user may create it. Unquoted: the
    # shell has to replace the variables.
    agent = agent_arguments(trial, "$SLURM_JOB_ID", '"$rendezvous"/store')
    command = " ".join([shlex.quote(settings.python), *agent, *_MODULE])
    return SlurmStep(
        command=command,
        cpus_per_task=trial.placement.cores_per_node,
        environment=ENVIRONMENT,
        preparation=("rendezvous=$(mktemp -d)", "trap 'rm -rf \"$rendezvous\"' EXIT"),
    )


def kubernetes_object(trial: Trial, settings: KubernetesSettings) -> dict[str, Any]:
    from paceline.runner.launchers.schedulers.kubernetes import single_pod_job  # noqa: PLC0415

    agent = agent_arguments(trial, "paceline", "/tmp/paceline.rendezvous")  # noqa: S108
    return single_pod_job([*agent, *_MODULE], trial, settings)


def main() -> int:
    rank, ranks = torchrun_place()
    job = parse_job("torchrun", _PROG)
    check_world(job.trial, ranks)
    check_started_once()
    if rank == 0 and not _restarts():
        prepare(job)
    store = None if ranks == 1 else _store_address(job, rank)
    context = rank_context(rank, [host_name()] * ranks, store)
    end = run_rank(job, context, [launching_pid()])
    if rank == 0 or (end.error is not None and not end.secondary):
        finish(job, end)
    return end.exit_code


def torchrun_place(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return (rank, number of ranks).

    Raises UsageError if torchrun did not start this process, EnvironmentLacks for several nodes.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        raise UsageError(
            "expected torchrun to start this process; use `torchrun --nproc-per-node N -m "
            "paceline.runner.launchers.torchrun`, or start ranks with `python -m "
            "paceline.runner.launchers.local`"
        )
    ranks, on_node = int(environment["WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"])
    if ranks != on_node:
        raise EnvironmentLacks(
            f'launcher "torchrun" starts ranks on one node only; expected {on_node} ranks (those '
            f'of this node), torchrun started {ranks}; use "mpi" or "spark" for several nodes'
        )
    return int(environment["RANK"]), ranks


def _store_address(job: Job, rank: int) -> StoreAddress:
    """Return rank 0's address. Raises TimedOut after `limits.rendezvous_s`."""
    own = listen_on(job.trial.interface) if rank == 0 else None
    return exchange_address(job, rank, own, f"{os.getppid()} {_restarts()}")


def _restarts() -> int:
    """Return how often the agent has started its ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


if __name__ == "__main__":
    sys.exit(run_guarded(main))
