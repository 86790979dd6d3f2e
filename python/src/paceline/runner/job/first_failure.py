"""The decision which rank failed first, and with which error the trial therefore ended."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.base.errors import ExitCode, RankFailed
from paceline.measure.records.documents import exit_code_of, failure_of, read_statuses
from paceline.measure.records.rows import Failure, RankStatus
from paceline.runner.job.failure_words import ENDED_WITHOUT_REASON, NO_REASON
from paceline.runner.job.job import Job
from paceline.runner.job.rank_status import RankEnd

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
