"""One rank from start to end, the same under every launcher."""

from __future__ import annotations

import os
import threading
import time
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks, ExitCode, PacelineError, TimedOut
from paceline.host.processes import die_with_parent
from paceline.job.checks import check_dataset
from paceline.job.messages import rank_failed_line, say
from paceline.job.rank_status import RankEnd, RankStatusFile, is_secondary, log_of, terminated
from paceline.job.sidecars import host_sidecar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.job.options import Job
    from paceline.training.context import RankContext

__all__ = ["RankEnd", "check_shared", "is_secondary", "run_rank"]

# A rank that only misses a peer ends later than that peer, so that launchers, which report and
# act upon the first end, see the cause first.
_LET_THE_CAUSE_SPEAK_S = 2.0


def run_rank(
    job: Job,
    context: RankContext,
    watched_pids: Sequence[int] = (),
    *,
    parent_is_launcher: bool = True,
) -> RankEnd:
    """Train as one rank and leave its status; never raises a PacelineError or Exception.

    watched_pids: roots of this node's process trees, for a sidecar that has to be started here.
    parent_is_launcher: then this rank does not outlive it; a shell, though, may well end first.
    """
    if parent_is_launcher:
        die_with_parent(os.getppid())
    end = _run(job, context, watched_pids)
    if end.secondary:
        time.sleep(_LET_THE_CAUSE_SPEAK_S)
    if job.managed and end.error is not None and not end.secondary:
        # the rank's own log has it already; this is for the launcher's
        say(rank_failed_line(end.rank, job.trial.placement.ranks, end.error))
    return end


def _run(job: Job, context: RankContext, watched_pids: Sequence[int]) -> RankEnd:
    status = RankStatusFile(job, context)
    with log_of(job, context), terminated(status), _time_limit(job, status):
        try:
            check_shared(job, context.host)
            status.write("running")
            status.log("starts")
            with host_sidecar(job, context, watched_pids):
                _train(job, context)
        except PacelineError as error:
            return status.failed(error)
        except Exception as error:  # noqa: BLE001  (told in the log and in the status)
            traceback.print_exc()
            return status.failed(error)
        status.write("done")
        status.log("is done")
        return RankEnd(rank=context.rank, exit_code=ExitCode.OK)


def _train(job: Job, context: RankContext) -> None:
    from paceline.training.resources import apply_resources  # noqa: PLC0415

    if job.trial.placement.nodes > 1 or not job.managed:
        check_dataset(job.trial.training.dataset)  # else the launcher has looked on this node
    apply_resources(context, job.trial)
    # Only now: it imports torch, which reads what apply_resources sets.
    from paceline.worker.worker import train  # noqa: PLC0415

    train(job.trial, context, job.files)


def check_shared(job: Job, host: str) -> None:
    """Raise EnvironmentLacks if the trial is not to be seen from this host."""
    if not job.files.trial.exists():
        raise EnvironmentLacks(
            f"host {host}: expected {job.files.trial}, there is none: the run directory "
            "must be on storage that all nodes share, under the same path"
        )


@contextmanager
def _time_limit(job: Job, status: RankStatusFile) -> Iterator[None]:
    """By hand nobody else minds `limits.trial_s`: say so and end, which ends the other ranks."""
    if job.managed:
        yield
        return
    limit_s = job.trial.limits.trial_s

    def end() -> None:
        status.failed(
            TimedOut(f"not done within its limit of {limit_s:g} s; raise it with --trial-timeout")
        )
        os._exit(ExitCode.TIMED_OUT)  # the main thread may be in a call that does not return

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
