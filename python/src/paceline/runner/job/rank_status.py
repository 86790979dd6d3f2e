"""The status, the log, the time limit and the end of one rank."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from paceline.base.errors import ExitCode, TimedOut
from paceline.base.host.messages import say
from paceline.collectives.host import Process
from paceline.measure.records.documents import exit_code_of, failure_of
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RankFiles
from paceline.measure.records.rows import TERMINATED, Failure, RankStatus
from paceline.plan.trials.rank_context import RankContext
from paceline.plan.trials.trial import Trial
from paceline.runner.job import failure_words
from paceline.runner.job.job import Job

# Messages of collectives whose peer has closed the connection: the cause is on another rank.
_PEER_GONE = (
    "connection reset by peer", "connection closed by peer", "connection refused", "broken pipe",
    "socket closed", "peer closed", "connection was likely closed",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """The end of a rank."""

    rank: int
    error: Failure | None = None  # None if the rank is done
    secondary: bool = False  # the error only says that a peer left

    @property
    def exit_code(self) -> ExitCode:
        """Return the exit code of a program that ends for this reason."""
        return ExitCode.OK if self.error is None else exit_code_of(self.error)

    @classmethod
    def of(cls, error: Exception, rank: int = 0, host: str | None = None) -> RankEnd:
        """Return the end of `rank`, or of the rank that the error names."""
        named = getattr(error, "rank", None)
        rank = rank if named is None else named
        failure = failure_of(error, rank, host)
        return cls(rank=rank, error=failure, secondary=is_secondary(error))


def is_secondary(error: BaseException) -> bool:
    """Return whether an error, or its cause, only says that a peer left."""
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__name__ == "PeerLost" or isinstance(seen, ConnectionError):
            return True
        if isinstance(seen, RuntimeError) and any(w in str(seen).lower() for w in _PEER_GONE):
            return True
        seen = seen.__cause__
    return False


class RankStatusFile:
    """The file `status.json` of one rank, replaced at every change."""

    def __init__(self, job: Job, context: RankContext) -> None:
        self._files: RankFiles = job.files.rank(context.rank)
        self._supervised = job.supervised
        self._ranks = job.trial.placement.ranks
        self._row = RankStatus(
            rank=context.rank,
            host=context.host,
            process_started_unix_s=context.process_started_unix_s,
            state="running",
            **dataclasses.asdict(Process.current()),
        )

    def write(
        self,
        state: Literal["running", "done", "failed"],
        error: Failure | None = None,
        *,
        secondary: bool = False,
        pid: int | None = None,
        started_unix_s: float | None = None,
    ) -> None:
        """Write the status; pid, started_unix_s: if they are not those of this process."""
        row = dataclasses.replace(self._row, state=state, error=error, secondary=secondary)
        if pid is not None:
            process = Process.of(pid)
            identity = {"pid": pid} if process is None else dataclasses.asdict(process)
            row = dataclasses.replace(row, **identity)
        if started_unix_s is not None:
            row = dataclasses.replace(row, process_started_unix_s=started_unix_s)
        write_json(self._files.status, row)

    def log(self, what: str) -> None:
        """Write a line to the rank's log, so that a tail of the log is never empty."""
        if self._supervised:
            row = self._row
            say(f"rank {row.rank} of {self._ranks} (host {row.host}, pid {row.pid}) {what}")

    def failed(self, error: Exception) -> RankEnd:
        """Report why this rank failed, in its status and on standard error."""
        rank, secondary = self._row.rank, is_secondary(error)
        failure = failure_of(error, rank, self._row.host)
        self.write("failed", failure, secondary=secondary)
        if secondary:
            say(failure_words.rank_lost_a_peer(rank, error))
        else:
            say(failure_words.rank_failed(failure, self._ranks))
        return RankEnd(rank=rank, error=failure, secondary=secondary)

    def asked_to_end(self) -> None:
        """Write that this rank was ended from outside."""
        row = self._row
        failure = Failure(
            kind=TERMINATED,
            message=failure_words.ASKED_TO_END,
            rank=row.rank,
            host=row.host,
            unix_s=time.time(),
        )
        self.write("failed", failure, secondary=True)


@contextmanager
def terminated(status: RankStatusFile) -> Iterator[None]:
    """Write on SIGTERM that this rank was ended from outside, and end at once.

    An orderly exit would wait for threads that wait for peers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        try:
            status.asked_to_end()
        finally:  # even if the status cannot be written
            os._exit(ExitCode.TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def log_of(job: Job, context: RankContext) -> Iterator[None]:
    """Redirect output to the rank's log under `paceline run`; else it stays on the terminal.

    Descriptors 1 and 2 themselves are replaced, so that the output of C libraries is included.
    """
    if not job.supervised:
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


def trial_timed_out(trial: Trial) -> TimedOut:
    """Return the error of a trial that took longer than `limits.trial_s`."""
    return TimedOut(failure_words.trial_too_long(trial.limits.trial_s))


@contextmanager
def trial_limit(job: Job, end: Callable[[], object]) -> Iterator[None]:
    """Call `end` from another thread after `limits.trial_s`, unless the block has ended.

    Do nothing under `paceline run`, which enforces the limit itself.
    """
    timer = threading.Timer(job.trial.limits.trial_s, end)
    timer.daemon = True
    if not job.supervised:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
