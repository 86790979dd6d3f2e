"""Ranks of a trial in rounds that are lost with their executor, or late.

Spark itself would continue with the remaining executors, where the ranks then share cores. That
would be a different configuration. And it waits without limit for a task that neither ends nor
fails; here, finished ranks wait for the last one no longer than an exchange may take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.base.errors import PacelineError, RankFailed, TimedOut
from paceline.base.host.processes import command_line_of
from paceline.measure.records.documents import read_statuses
from paceline.runner.job import failure_words
from paceline.runner.job.job import Job
from paceline.runner.job.rank_status import RankEnd
from paceline.runner.launchers.spark.barrier import executor_pid
from paceline.runner.launchers.spark.configuration import heartbeat_s
from paceline.runner.launchers.spark.rounds.claims import Claims

if TYPE_CHECKING:
    from paceline.train.rank.rounds.exchange import RankReport

# Option of CoarseGrainedExecutorBackend under every cluster manager.
_ID_OPTION = "--executor-id"


def own_executor() -> str | None:
    """Return Spark's name of this process's executor; None with a local master."""
    executor = executor_pid()
    words = [] if executor is None else command_line_of(executor)
    return words[words.index(_ID_OPTION) + 1] if _ID_OPTION in words[:-1] else None


@dataclass(frozen=True, slots=True)
class ExecutorPlace:
    """The host of an executor that ran tasks, and the ranks of those tasks."""

    host: str
    ranks: tuple[int, ...]


class Executors:
    """The executors that ran tasks of a trial."""

    def __init__(self, alive: Callable[[], Collection[str]] | None = None) -> None:
        """alive: returns the executors that Spark has; None with a local master."""
        self._alive = alive
        self._seen: dict[str, ExecutorPlace] = {}

    def saw(self, reports: Mapping[int, RankReport]) -> None:
        """Record where the tasks of a round ran; executors without a task keep their ranks."""
        ranks: dict[str, list[int]] = {}
        hosts: dict[str, str] = {}
        for rank, rank_report in sorted(reports.items()):
            if rank_report.executor is not None:
                ranks.setdefault(rank_report.executor, []).append(rank)
                hosts[rank_report.executor] = rank_report.host
        self._seen |= {
            name: ExecutorPlace(hosts[name], tuple(those)) for name, those in ranks.items()
        }

    def place(self, name: str) -> ExecutorPlace | None:
        """Return the place of an executor; None if it has not run a task yet."""
        return self._seen.get(name)

    def lost(self) -> RankFailed | None:
        """Return the error about an executor that Spark has lost; None if it has all of them."""
        if self._alive is None or not self._seen:
            return None
        alive = self._alive()
        for name, place in self._seen.items():
            if name not in alive:
                return lost_executor(name, place, failure_words.EXECUTOR_GONE)
        return None


def lost_executor(name: str, place: ExecutorPlace, why: str) -> RankFailed:
    """Return the error about a lost executor; it names the executor's first rank."""
    text = failure_words.executor_lost(name, place.host, place.ranks, why)
    return RankFailed(text, place.ranks[0])


_POLL_S = 0.25


class Stragglers:
    """Ends a round in which some ranks are too late."""

    def __init__(
        self, job: Job, claims: Claims, executors: Executors, cancel: Callable[[], object]
    ) -> None:
        """cancel: ends the current round, which then fails; called from another thread."""
        self.end: RankEnd | None = None  # of the rank that was too late, if one was
        self._job = job
        self._claims = claims
        self._executors = executors
        self._cancel = cancel

    @contextmanager
    def limited(self, number: int) -> Iterator[None]:
        """Enforce the limit while round `number` runs."""
        over = threading.Event()
        watch = threading.Thread(
            target=self._watch, args=(number, over), name="stragglers", daemon=True
        )
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()

    def _starting(self, ranks: set[int]) -> bool:
        """Return whether one of the ranks has not taken a step yet, as in the first round."""
        files = [self._job.files.rank(rank).steps for rank in ranks]
        return not all(file.exists() and file.stat().st_size for file in files)

    def _watch(self, number: int, over: threading.Event) -> None:
        ranks = set(range(self._job.trial.placement.ranks))
        limits = self._job.trial.limits
        # Spark notices a lost executor at most two heartbeats after the limit of a collective.
        sending_s = limits.collective_s + 2 * heartbeat_s(self._job.trial)
        all_done, since_s = False, None  # when the first rank was done, later when the last was
        until_s = 0.0  # until then a rank may still be starting
        while not over.wait(_POLL_S):
            late = ranks - self._claims.done(number)
            if late == ranks:
                continue
            now_s = time.monotonic()
            if since_s is None or (not late and not all_done):
                all_done, since_s = not late, now_s
                until_s = now_s + limits.rendezvous_s if number == 0 else now_s
            if now_s < until_s and self._starting(late):
                since_s = now_s
            if now_s - since_s > (limits.collective_s if late else sending_s):
                error = self._too_late(number, late) if late else self._unsent(number, ranks)
                self.end = RankEnd.of(error, min(late or ranks))
                self._cancel()
                return

    def _too_late(self, number: int, late: set[int]) -> PacelineError:
        limit_s = self._job.trial.limits.collective_s
        return TimedOut(failure_words.round_too_late(number, self._listed(late), limit_s))

    def _unsent(self, number: int, ranks: set[int]) -> PacelineError:
        limit_s = self._job.trial.limits.collective_s
        return self._executors.lost() or TimedOut(
            failure_words.round_not_received(number, self._listed(ranks), limit_s)
        )

    def _listed(self, ranks: set[int]) -> str:
        hosts = {s.rank: s.host for s in read_statuses(self._job.files)}
        return ", ".join(f"rank {r} ({hosts.get(r, 'not seen yet')})" for r in sorted(ranks))
