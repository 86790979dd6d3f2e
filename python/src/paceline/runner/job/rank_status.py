"""The status, the log, the time limit and the end of one rank."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from paceline.base.errors import ExitCode, PacelineError, RankFailed, TimedOut
from paceline.base.host.messages import say, show_warning
from paceline.collectives.host import Process
from paceline.measure.records.documents import (
    exit_code_of,
    failure_of,
    read_reported,
    read_statuses,
)
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RankFiles, TrialFiles
from paceline.measure.records.rows import TERMINATED, Failure, RankStatus
from paceline.plan.trials.trial import RankContext, Trial
from paceline.runner.job import failure_words
from paceline.runner.job.failure_words import ENDED_WITHOUT_REASON, NO_REASON
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


# --- messages of a job script on standard error, and its exit code after an error ----------------


def run_guarded(main: Callable[[], int]) -> int:
    """Run a job script's `main` and return its exit code; a PacelineError gets no stack trace."""
    warnings.showwarning = show_warning
    try:
        return main()
    except PacelineError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001  (the stack trace goes to the log)
        traceback.print_exc()
        say(f"unexpected {type(error).__name__}: {error}; see the stack trace above")
        return ExitCode.RANK_FAILED


# --- the decision which rank failed first, and with which error the trial therefore ended --------

# Ends of ranks after which a new start may help: one failed, or waited for a lost one too long.
RESTARTED_CODES = frozenset({ExitCode.RANK_FAILED, ExitCode.TIMED_OUT})


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFailure:
    """The rank that failed first. None if neither a rank nor the launcher gives a hint."""

    rank: int | None
    status: RankStatus | None = None  # of that rank, if it wrote one

    @property
    def error(self) -> Failure | None:
        """The reason that the rank itself wrote; None if it died without one."""
        if self.status is None or self.status.state != "failed":
            return None
        return self.status.error or self._failure(NO_REASON)

    @property
    def was_asked_to_end(self) -> bool:
        """The rank was ended from outside. Its launcher may know why."""
        return self.error is not None and self.error.was_asked_to_end

    @property
    def is_unexplained(self) -> bool:
        """The rank did not write why it failed: it was killed, or ended from outside."""
        return self.error is None or self.was_asked_to_end

    def end(self, otherwise: str) -> RankEnd:
        """Return the end of the trial; `otherwise` is the reason if the rank wrote none."""
        return RankEnd(rank=self.rank or 0, error=self.error or self._failure(otherwise))

    def _failure(self, message: str) -> Failure:
        host = None if self.status is None else self.status.host
        return failure_of(RankFailed(message), self.rank or 0, host)


def written_cause(statuses: Sequence[RankStatus]) -> FirstFailure | None:
    """Return the first failure of which a rank wrote the cause; None if no rank wrote one.

    A rank that lost a peer, or waited too long for others, does not know the cause.
    """
    own_errors = [s for s in statuses if s.state == "failed" and not s.secondary]
    causes = [s for s in own_errors if exit_code_of(s.error) != ExitCode.TIMED_OUT]
    if not causes:
        return None
    first = min(causes, key=_written)
    return FirstFailure(rank=first.rank, status=first)


def recorded_end(files: TrialFiles, statuses: Sequence[RankStatus]) -> RankEnd | None:
    """Return the end of a trial whose cause a rank wrote, or the job side reported; else None."""
    written = written_cause(statuses)
    if written is not None:
        return written.end(NO_REASON)
    reported = read_reported(files)
    return None if reported is None else RankEnd(rank=reported.rank, error=reported)


def _written(status: RankStatus) -> tuple[float, int]:
    """Return a key that sorts failures by time; by rank where the time is not known."""
    unix_s = None if status.error is None else status.error.unix_s
    return (math.inf if unix_s is None else unix_s, status.rank)


def first_failure(
    statuses: Sequence[RankStatus],
    *,
    named: int | None = None,
    dead: Collection[int] = (),
    without_peer: Sequence[int] = (),
) -> FirstFailure:
    """Return the rank that failed first.

    named: rank that the launcher's own messages name. dead: ranks whose process ended without a
    reason. without_peer: ranks that were ended because they had lost their connection to a rank of
    another host, the first one first. So ranks of its own host that wrote no error are not the
    first, unless the launcher names another one of them. In order of weight:

    1. a rank that wrote an error of its own (`written_cause`): its peers may have been killed
       because of it. What a launcher says has no weight then;
    2. a rank that is known to have died, unless the launcher names one that never began;
    3. the rank that the launcher names;
    4. a rank that waited too long for others, then one that wrote no end, then one that was asked
       to end while others lost it.

    A rank whose only error is that a peer left is never the first. One that was asked to end may
    be: inside Spark, mpirun asks its ranks to end when the task that started it has died.
    """
    written = written_cause(statuses)
    if written is not None:
        return written
    excused = _excused(statuses, named, without_peer)
    rank = _first_rank(
        [s for s in statuses if s.rank not in excused],
        None if named in excused else named,
        [rank for rank in dead if rank not in excused],
    )
    return FirstFailure(rank=rank, status=next((s for s in statuses if s.rank == rank), None))


def _excused(
    statuses: Sequence[RankStatus], named: int | None, without_peer: Sequence[int]
) -> set[int]:
    """Return the ranks without an error that are on the host of the first one without its peer."""
    hosts = {s.host for s in statuses if s.rank in without_peer[:1]}
    there = {s.rank for s in statuses if s.host in hosts and s.state == "running"}
    return there if named in without_peer else there - {named}


def _first_rank(
    statuses: Sequence[RankStatus], named: int | None, dead: Collection[int]
) -> int | None:
    too_late = [s.rank for s in statuses if s.state == "failed" and not s.secondary]
    running = [s.rank for s in statuses if s.state == "running"]
    has_begun = named is None or any(s.rank == named for s in statuses)
    if dead and has_begun:  # else the others were ended because of it
        # Spark ends the peers of a lost task at once, so several may have died between two looks.
        return named if named in running else min(dead)
    asked = [s.rank for s in statuses if s.error is not None and s.error.was_asked_to_end]
    lost_a_peer = {s.rank for s in statuses if s.secondary and s.rank not in asked}
    if named is not None and named not in lost_a_peer:
        return named
    # Its launcher, YARN for example, has ended the rank that the others lost.
    return next(iter([*too_late, *running, *(asked if lost_a_peer else [])]), None)


def trial_end(job: Job, ends: Iterable[RankEnd | None], reason: str | None = None) -> RankEnd:
    """Return the end that stands for the whole trial.

    ends: of every rank, by rank; None for a rank that ended without one. reason: what the launcher
    knows about such a rank.
    """
    given = list(ends)
    dead = [rank for rank, end in enumerate(given) if end is None]
    failed = [end for end in given if end is not None and end.error is not None]
    if not dead and not failed:
        return RankEnd(rank=0)
    failure = first_failure(read_statuses(job.files), dead=dead)
    causes = [end for end in failed if not end.secondary]
    if failure.error is None and causes:
        return causes[0]
    if failure.rank is None and failed:
        return failed[0]
    return failure.end(reason or ENDED_WITHOUT_REASON)


def outcome_status(exit_code: int) -> Literal["ok", "failed", "timed_out", "refused"]:
    """Return the status that `outcome.json` records for an exit code."""
    if exit_code == ExitCode.OK:
        return "ok"
    if exit_code == ExitCode.TIMED_OUT:
        return "timed_out"
    refusals = (ExitCode.USAGE, ExitCode.ENVIRONMENT, ExitCode.DATA)
    return "refused" if exit_code in refusals else "failed"
