"""`local`: start ranks on this node without a launcher, as a user would by hand.

`python -m paceline.runner.launchers.local` starts the ranks, or is one of them. A single rank
trains in this process. Several ranks become children of this process, each of which runs this
module again. This process ends them. The same program runs under schedulers.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

from paceline.base.errors import ExitCode, RankFailed
from paceline.base.host.messages import say
from paceline.base.host.processes import end_processes, guarded
from paceline.collectives.host import host_name
from paceline.measure.records.documents import failure_of, read_statuses
from paceline.measure.records.layout import TrialFiles
from paceline.plan.trials.trial import Trial
from paceline.runner.job import (
    Job,
    StoreAddress,
    check_started_once,
    finish,
    parse_job,
    prepare,
    rank_context,
    run_guarded,
    run_rank,
)
from paceline.runner.job.context import rank_environment
from paceline.runner.job.failure_words import ended_without_error, rank_failed
from paceline.runner.job.job import close_listener, listen_on
from paceline.runner.job.rank_status import RankEnd, first_failure, trial_timed_out
from paceline.runner.launchers.base import Command, shared_memory_of_mpi
from paceline.runner.launchers.supervise import WaitLimits, wait_for_end
from paceline.runner.preflight.this_host import check_trial

# Files of a scheduler are rendered by the command side; a rank does not load what renders them.
if TYPE_CHECKING:
    from paceline.runner.launchers.schedulers.kubernetes import KubernetesSettings
    from paceline.runner.launchers.schedulers.slurm import SlurmSettings, SlurmStep

_MODULE = ["-m", "paceline.runner.launchers.local"]
RANK_VARIABLE = "PACELINE_RANK"
# host:port:secret:descriptor; only rank 0 has a descriptor. Other accounts cannot read it.
STORE_VARIABLE = "PACELINE_STORE"
# The peers of a failed rank often notice it first; they get this long to write their own status.
_NOTICE_S = 1.0
_TERMINATION_S = 3.0


class LocalLauncher:
    """Starts plain processes on one node, as a user would by hand."""

    def preflight(self, trial: Trial) -> None:
        check_trial(trial)

    def command(self, trial: Trial, files: TrialFiles) -> Command:
        argv = (sys.executable, *_MODULE, "--trial", str(files.trial))
        return Command(
            argv=argv, environment=rank_environment(trial), temporary=shared_memory_of_mpi
        )

    def failed_rank(self, log_text: str) -> int | None:  # noqa: ARG002
        return None  # the job side reports it


def slurm_step(trial: Trial, settings: SlurmSettings) -> SlurmStep:
    """Return one task that starts all ranks."""
    from paceline.runner.launchers.schedulers.slurm import SlurmStep  # noqa: PLC0415

    command = shlex.join([settings.python, *_MODULE])
    return SlurmStep(command=command, cpus_per_task=trial.placement.cores_per_node)


def kubernetes_object(trial: Trial, settings: KubernetesSettings) -> dict[str, Any]:
    from paceline.runner.launchers.schedulers.kubernetes import single_pod_job  # noqa: PLC0415

    return single_pod_job(_MODULE, trial, settings)


def main() -> int:
    job = parse_job("local", "python -m paceline.runner.launchers.local")
    if RANK_VARIABLE in os.environ:
        return _child(job)
    check_started_once()
    prepare(job)
    if job.trial.placement.ranks > 1:
        end = run_ranks(job)
    else:
        context = rank_context(0, [host_name()], None)
        end = run_rank(job, context, [os.getpid()], parent_is_launcher=job.supervised)
    finish(job, end)
    return end.exit_code


def _child(job: Job) -> int:
    host, port, secret, descriptor = os.environ[STORE_VARIABLE].split(":")
    listen_fd = int(descriptor) if descriptor else None
    store = StoreAddress(host=host, port=int(port), secret=secret, listen_fd=listen_fd)
    hosts = [host_name()] * job.trial.placement.ranks
    context = rank_context(int(os.environ[RANK_VARIABLE]), hosts, store)
    return run_rank(job, context, [os.getppid()]).exit_code


def run_ranks(job: Job) -> RankEnd:
    """Start every rank of the trial as a child and wait for all; one failure ends all.

    The limit is `limits.trial_s`. A child never outlives this process.
    """
    address = listen_on(job.trial.interface)
    ranks = job.trial.placement.ranks
    children: list[subprocess.Popen[bytes]] = []
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        try:
            for rank in range(ranks):
                children.append(_start(job, rank, address))  # noqa: PERF401  (each is ended below)
        finally:
            close_listener(address)  # rank 0 has inherited it
        limits = WaitLimits(trial_s=job.trial.limits.trial_s, notice_s=_NOTICE_S)
        watched = wait_for_end(children, job.files, limits)
        dead = [rank for rank, child in enumerate(children) if child.poll()]
    finally:
        exit_statuses = end_processes(children, _TERMINATION_S)
        signal.signal(signal.SIGTERM, before)
    if watched.timed_out:
        error = trial_timed_out(job.trial)
        say(str(error))
        return RankEnd.of(error)
    if not any(exit_statuses):
        return RankEnd(rank=0)
    return _failed(job, dead, exit_statuses)


def _start(job: Job, rank: int, address: StoreAddress) -> subprocess.Popen[bytes]:
    descriptor = address.listen_fd if rank == 0 else None
    store = (address.host, address.port, address.secret, "" if descriptor is None else descriptor)
    environment = {
        **os.environ,
        **rank_environment(job.trial),
        RANK_VARIABLE: str(rank),
        STORE_VARIABLE: ":".join(map(str, store)),
    }
    return subprocess.Popen(
        guarded([sys.executable, *_MODULE, *sys.argv[1:]]),
        env=environment,
        stdin=subprocess.DEVNULL,
        pass_fds=() if descriptor is None else (descriptor,),
    )


def _failed(job: Job, dead: list[int], exit_statuses: list[int]) -> RankEnd:
    statuses = read_statuses(job.files)
    errors = {s.rank: s.error for s in statuses if s.state == "failed"}
    failure = first_failure(statuses, dead=[rank for rank in dead if rank not in errors])
    first = next(rank for rank, status in enumerate(exit_statuses) if status)
    rank = first if failure.rank is None else failure.rank
    if errors.get(rank):
        return RankEnd(rank=rank, error=errors[rank])  # the rank itself has printed it
    killed = RankFailed(ended_without_error(exit_statuses[rank]))
    error = failure_of(killed, rank, host_name())
    say(rank_failed(error, len(exit_statuses)))
    return RankEnd(rank=rank, error=error)


def _raise_terminated(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(ExitCode.TERMINATED)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
