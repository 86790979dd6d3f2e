"""One rank from start to end, the same under every launcher."""

from __future__ import annotations

import errno
import faulthandler
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

from paceline.base.errors import EnvironmentLacks, ExitCode, PacelineError, TimedOut
from paceline.base.host.memory import permanent_objects
from paceline.base.host.messages import say
from paceline.base.host.processes import die_with_parent
from paceline.base.host.programs import SAFE_PATH_VARIABLE, missing_extra
from paceline.collectives.signatures import use_secret
from paceline.measure.records.documents import begin_attempt
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.measure.records.metrics.declared import facts_of
from paceline.measure.telemetry import (
    SidecarHandle,
    SidecarRequest,
    sidecar_is_alive,
    start_sidecar,
)
from paceline.plan.trials.trial import RankContext, Trial
from paceline.runner.job.context import SIDECAR_HOST_VARIABLE, launching_pid
from paceline.runner.job.failure_words import rank_failed
from paceline.runner.job.job import Job
from paceline.runner.job.rank_status import (
    RankEnd,
    RankStatusFile,
    log_of,
    terminated,
    trial_limit,
    trial_timed_out,
)
from paceline.runner.job.run_directory import check_shared
from paceline.runner.job.stacks import answer_requests, request_stacks, write_error
from paceline.runner.preflight.this_host import check_inputs

# --- sidecars of a trial: one process on each host that has ranks --------------------------------
#
# Each trial has sidecars of its own: then a sidecar has one task, needs no protocol for the next
# trial, and works the same on every host, under every launcher. `SidecarRequest.ports` keeps
# the port stable during a run.


def watch(
    trial: Trial, files: TrialFiles, host_name: str, pids: Sequence[int]
) -> list[SidecarHandle]:
    """Start a sidecar for the process trees of `pids` and the trial's ranks on this host.

    Return its handle, or nothing if the trial wants no sidecar or it cannot be started; that is a
    warning, never an error of the trial.
    """
    if not trial.telemetry.enabled:
        return []
    host = files.host(host_name)
    run = RunFiles(files.root.absolute().parent.parent)  # see RunFiles.trial
    handle = start_sidecar(
        SidecarRequest(
            settings=trial.telemetry,
            run=run.root.name,
            trace=host.trace,
            state=host.sidecar,
            pids=tuple(pids),
            # A user may have given the launcher some cores (taskset); a rank may have fewer.
            cores=tuple(sorted(os.sched_getaffinity(launching_pid()))),
            trial_root=files.root,
            replicas=trial.placement.replicas,
            # the same path for every process, whatever link it came by
            run_targets=run.targets.resolve(),
            facts=facts_of(trial),
        )
    )
    return [] if handle is None else [handle]


@contextmanager
def host_sidecar(job: Job, context: RankContext, watched_pids: Sequence[int]) -> Iterator[None]:
    """Run a sidecar on this host while its first rank trains, unless the host has one already."""
    if (
        context.local_rank != 0
        or os.environ.get(SIDECAR_HOST_VARIABLE) == context.host
        or sidecar_is_alive(job.files.host(context.host).sidecar)
    ):
        yield
        return
    sidecars = watch(job.trial, job.files, context.host, watched_pids or (os.getpid(),))
    try:
        yield
    finally:
        for sidecar in sidecars:
            sidecar.stop()


# A rank that only lost a peer ends later than that peer. Launchers report and act on the first end,
# so they see the cause first.
_CAUSE_FIRST_S = 2.0


def run_rank(
    job: Job,
    context: RankContext,
    watched_pids: Sequence[int] = (),
    *,
    parent_is_launcher: bool = True,
) -> RankEnd:
    """Train as one rank and write its status; never raises a PacelineError or Exception.

    watched_pids: roots of the process trees on this node that a sidecar observes, if this rank has
    to start one. parent_is_launcher: this rank ends with its parent process; False if that is a
    shell, which may end first.
    """
    if SAFE_PATH_VARIABLE not in job.trial.environment:  # what a script starts expects the default
        os.environ.pop(SAFE_PATH_VARIABLE, None)
    use_secret("" if context.store is None else context.store.secret)
    if parent_is_launcher:
        die_with_parent(os.getppid())
    end = _run(job, context, watched_pids)
    if end.secondary:
        time.sleep(_CAUSE_FIRST_S)
    if job.supervised and end.error is not None and not end.secondary:
        # The rank's own log has this line already; this one is for readers of the launcher's log.
        say(rank_failed(end.error, job.trial.placement.ranks))
    return end


def _run(job: Job, context: RankContext, watched_pids: Sequence[int]) -> RankEnd:
    begin_attempt(job.files.rank(context.rank))
    answer_requests(job.files.rank(context.rank))
    status = RankStatusFile(job, context)

    def expire() -> None:
        try:
            status.failed(trial_timed_out(job.trial))
        finally:  # even if the status cannot be written
            os._exit(ExitCode.TIMED_OUT)  # the main thread may be in a call that does not return

    with log_of(job, context), terminated(status), trial_limit(job, expire):
        # The stack of a crash goes to the log, where the launcher cannot say where it was.
        faulthandler.enable(file=2, all_threads=False)
        try:
            check_shared(job, context.host)
            status.write("running")
            status.log("starts")
            with host_sidecar(job, context, watched_pids):
                _train(job, context)
        except PacelineError as error:
            write_error(job.files.rank(context.rank), error)
            if isinstance(error, TimedOut):  # its end lets launchers end the other ranks
                request_stacks(job.files)
            return status.failed(error)
        except Exception as error:  # noqa: BLE001  (the log and the status report it)
            if isinstance(error, OSError) and error.errno in _DISK_FULL:
                return status.failed(_disk_full(error))
            missing = missing_extra(error) if isinstance(error, ImportError) else None
            if missing is not None:
                return status.failed(missing)
            traceback.print_exc()
            return status.failed(error)
        status.write("done")
        status.log("is done")
        return RankEnd(rank=context.rank)


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def _disk_full(error: OSError) -> EnvironmentLacks:
    return EnvironmentLacks(
        f"{error.filename or 'a file'}: {error.strerror}; free some space, or choose another disk"
    )


def _train(job: Job, context: RankContext) -> None:
    prepare_process(job, context)
    import_train(job.trial).train(job.trial, context, job.files)


def prepare_process(job: Job, context: RankContext) -> None:
    """Check the data set, and set threads and cores. Call it before torch is imported.

    Torch reads the settings at its import. Raises EnvironmentLacks.
    """
    from paceline.train.training.resources import apply_resources  # noqa: PLC0415

    if job.trial.placement.nodes > 1 or not job.supervised:
        check_inputs(job.trial)  # else preflight has checked it on this node
    apply_resources(context, job.trial)


def import_train(trial: Trial) -> ModuleType:
    """Import the module whose `train` does the work of a rank, and torch with it."""
    script = trial.training.script
    with permanent_objects():
        return import_module(
            "paceline.train.rank.train" if script is None else "paceline.train.rank.script.train"
        )
