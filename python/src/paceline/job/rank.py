"""One rank from start to end, the same under every launcher."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.errors import EnvironmentLacks, ExitCode, PacelineError, TimedOut
from paceline.job.messages import rank_failed_line, say
from paceline.job.sidecars import host_sidecar
from paceline.launch.checks import check_dataset
from paceline.launch.processes import die_with_parent
from paceline.launch.statuses import error_text, exit_code_of
from paceline.records.files import write_json
from paceline.records.rows import RankStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from paceline.job.options import Job
    from paceline.records.layout import RankFiles
    from paceline.train.context import RankContext

# What collectives raise when the other end has gone: the cause lies on another rank.
_PEER_GONE = (
    "connection reset by peer", "connection closed by peer", "connection refused", "broken pipe",
    "socket closed", "peer closed", "connection was likely closed",
)  # fmt: skip
# A rank that only misses a peer ends later than that peer, so that launchers, which report and
# act upon the first end, see the cause first.
_LET_THE_CAUSE_SPEAK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How a rank ended; error is None if it is done."""

    rank: int
    exit_code: int
    error: str | None = None
    secondary: bool = False


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
    status = _Status(job, context)
    with _log_of(job, context), _terminated(status), _time_limit(job, status):
        try:
            _check_shared(job, context)
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
    from paceline.train.resources import apply_resources  # noqa: PLC0415

    if job.trial.placement.nodes > 1 or not job.managed:
        check_dataset(job.trial.training.dataset)  # else the launcher has looked on this node
    apply_resources(context, job.trial)
    # Only now: it imports torch, which reads what apply_resources sets.
    from paceline.train.worker import train  # noqa: PLC0415

    train(job.trial, context, job.files)


def _check_shared(job: Job, context: RankContext) -> None:
    if not job.files.trial.exists():
        raise EnvironmentLacks(
            f"host {context.host}: expected {job.files.trial}, there is none: the run directory "
            "must be on storage that all nodes share, under the same path"
        )


def is_secondary(error: BaseException) -> bool:
    """Whether an error, or what caused it, only says that a peer went away."""
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__name__ == "PeerLost" or isinstance(seen, ConnectionError):
            return True
        if isinstance(seen, RuntimeError) and any(w in str(seen).lower() for w in _PEER_GONE):
            return True
        seen = seen.__cause__
    return False


class _Status:
    """`status.json` of one rank, replaced as it goes."""

    def __init__(self, job: Job, context: RankContext) -> None:
        self._files: RankFiles = job.files.rank(context.rank)
        self._managed = job.managed
        self._ranks = job.trial.placement.ranks
        self._row = RankStatus(
            rank=context.rank,
            host=context.host,
            pid=os.getpid(),
            process_started_unix_s=context.process_started_unix_s,
            state="running",
        )

    def write(
        self,
        state: Literal["running", "done", "failed"],
        error: str | None = None,
        *,
        secondary: bool = False,
    ) -> None:
        row = dataclasses.replace(self._row, state=state, error=error, secondary=secondary)
        write_json(self._files.status, dataclasses.asdict(row))

    def log(self, what: str) -> None:
        """A line in the rank's log, so that its end tells something; nothing by hand."""
        if self._managed:
            row = self._row
            say(f"rank {row.rank} of {self._ranks} (host {row.host}, pid {row.pid}) {what}")

    def failed(self, error: Exception) -> RankEnd:
        """Say why this rank failed, in its status and on standard error."""
        text, secondary = error_text(error), is_secondary(error)
        self.write("failed", text, secondary=secondary)
        if secondary:
            say(f"rank {self._row.rank} stops, another rank is the cause: {error}")
        else:
            say(rank_failed_line(self._row.rank, self._ranks, text))
        return RankEnd(
            rank=self._row.rank,
            exit_code=exit_code_of(text),
            error=text,
            secondary=secondary,
        )


@contextmanager
def _terminated(status: _Status) -> Iterator[None]:
    """On SIGTERM, write that this rank was asked to end, and end at once.

    At once: an orderly exit would wait for threads that wait for peers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        status.write("failed", "Terminated: asked to end (SIGTERM)", secondary=True)
        os._exit(ExitCode.TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _time_limit(job: Job, status: _Status) -> Iterator[None]:
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


@contextmanager
def _log_of(job: Job, context: RankContext) -> Iterator[None]:
    """Under `paceline run`, output goes to the rank's log; by hand it stays on the terminal.

    Descriptors 1 and 2 themselves, so that what C libraries print comes along.
    """
    if not job.managed:
        yield
        return
    path = job.files.rank(context.rank).log
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [(number, os.dup(number)) for number in (1, 2)]
    with path.open("ab") as log:
        for number, _ in kept:
            os.dup2(log.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, original in kept:
            os.dup2(original, number)
            os.close(original)
