"""The driver's part of rounds: distribute weights, average them, and explain a failed round.

The module works without Spark: the job script passes a function that runs the tasks of a round.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping

from paceline.base.errors import PacelineError
from paceline.base.host.machine import SAME_CLOCK, ClockOffset
from paceline.measure.records.documents import read_statuses
from paceline.runner.job.context import rank_context
from paceline.runner.job.failure_words import NO_REASON, round_task_killed
from paceline.runner.job.job import Job
from paceline.runner.job.rank_status import (
    FirstFailure,
    RankEnd,
    first_failure,
    trial_limit,
    trial_timed_out,
    written_cause,
)
from paceline.runner.launchers.spark.barrier import failed_stage
from paceline.runner.launchers.spark.rounds.round_task import (
    Claims,
    ExecutorPlace,
    Executors,
    Stragglers,
    lost_executor,
)
from paceline.train.rank.round_exchange import Carry, Orders, RankReport, Report, State
from paceline.train.training.resources import RankCores, check_node

RunRound = Callable[[Orders, State | None], Report]  # one task for each rank; raises RoundFailed
# Spark's message for a lost Python worker or executor: the task's partition, and the reason.
_LOST_TASK = re.compile(
    r"Task (\d+) in stage [\d.]+ failed \d+ times?, most recent failure: (?:Lost task [^:]*: )?"
    r"(?:Executor|org\.apache\.spark\.SparkException: Python worker exited)([^\n]*)"
)
# Its message for a lost executor: the host as Spark names it, the executor's name, the reason.
_LOST_EXECUTOR = re.compile(
    r"\((\S+) executor (\S+)\): ExecutorLostFailure [^\n]*?Reason: ([^\n]*)"
)


class RoundFailed(Exception):  # noqa: N818  (the job script converts Spark's error)
    """Spark could not complete a round; the message is Spark's."""


def run_rounds(
    job: Job,
    run_round: RunRound,
    cancel: Callable[[], object],
    executors_alive: Callable[[], Collection[str]] | None = None,
) -> RankEnd:
    """Train in rounds until all steps are done; return the end, never raise a PacelineError.

    cancel: ends the current round, which then fails. It is called from another thread if ranks are
    too late, or after `limits.trial_s` if no supervisor enforces it.
    executors_alive: Spark's names of its executors; None with a local master.
    """
    rounds = Rounds(job, run_round, cancel, executors_alive)
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        cancel()

    with trial_limit(job, expire):
        try:
            rounds.train()
        except RoundFailed as error:
            if expired.is_set():
                return RankEnd.of(trial_timed_out(job.trial))
            if rounds.stragglers.end is not None:
                return rounds.stragglers.end
            return failed_round(job, rounds.number, str(error), rounds.executors)
        except PacelineError as error:
            return RankEnd.of(error)
        finally:
            rounds.close()
    return RankEnd(rank=0)


class Rounds:
    """The rounds of one trial, in order."""

    def __init__(
        self,
        job: Job,
        run_round: RunRound,
        cancel: Callable[[], object],
        executors_alive: Callable[[], Collection[str]] | None,
    ) -> None:
        self.number = 0  # of the current round
        self._job = job
        self._run_round = run_round
        self._claims = Claims(job.files.claims, job.trial.placement)
        self.executors = Executors(executors_alive)
        self.stragglers = Stragglers(job, self._claims, self.executors, cancel)
        self._clocks = _Clocks()
        self._moves = 0

    def train(self) -> None:
        """Run all rounds and the tasks that end the ranks. Raises RoundFailed."""
        report = self._run(Orders(number=0), None)
        self._check_nodes(report)
        while not _all_done(report):
            self.number += 1
            report = self._run(Orders(number=self.number, carries=_carries(report)), report.total)
        self.number += 1
        self._run(
            Orders(
                number=self.number,
                carries=_carries(report),
                finish=True,
                clocks=self._clocks.relative(),
                facts={"rounds": self.number, "moved_ranks": self._moves},
            ),
            report.total,
        )

    def close(self) -> None:
        self._claims.close()

    def _run(self, orders: Orders, state: State | None) -> Report:
        lost = self.executors.lost()
        if lost is not None:
            raise lost
        began_unix_s = time.time()
        with self.stragglers.limited(orders.number):
            report = self._run_round(orders, state)
        self.executors.saw(report.ranks)
        self._clocks.saw(report.ranks, (began_unix_s, time.time()))
        self._moves += sum(own.moved for own in report.ranks.values())
        ranks = sorted(report.ranks)
        if ranks != list(range(self._job.trial.placement.ranks)):
            raise RoundFailed(f"round {orders.number}: only ranks {ranks} reported")
        self._claims.forget(orders.number)
        return report

    def _check_nodes(self, report: Report) -> None:
        """Check that ranks do not share cores; in rounds only the driver sees all of them."""
        hosts = [own.host for _, own in sorted(report.ranks.items())]
        for host in dict.fromkeys(hosts):
            ranks = [rank for rank, other in enumerate(hosts) if other == host]
            cores = [RankCores.from_json(report.ranks[rank].cores) for rank in ranks]
            check_node(rank_context(ranks[0], hosts, None), self._job.trial.placement, cores)


def failed_round(job: Job, number: int, message: str, executors: Executors) -> RankEnd:
    """Return how the first rank of a failed round ended.

    From the statuses of the ranks; else from Spark's message.
    """
    statuses = read_statuses(job.files)
    written = written_cause(statuses)
    if written is not None:
        return written.end(NO_REASON)
    lost = _LOST_TASK.search(message)
    if lost is None:
        # Results of a lost executor are missing elsewhere, in a message that does not name it.
        executor = executors.lost()
        return failed_stage(job, message) if executor is None else RankEnd.of(executor)
    partition = int(lost.group(1))
    claimed = Claims(job.files.claims, job.trial.placement).rank_of(number, partition)
    rank = partition if claimed is None else claimed
    failure = first_failure(statuses, named=rank)
    if failure.error is not None:
        return failure.end(NO_REASON)
    gone = _LOST_EXECUTOR.search(message)
    if gone is None:
        return FirstFailure(rank=rank).end(round_task_killed(lost.group(2)))
    address, name, why = gone.groups()
    # An executor that was lost in its first round has no known place.
    host = next((s.host for s in statuses if s.rank == rank), address)
    place = executors.place(name) or ExecutorPlace(host, (rank,))
    return RankEnd.of(lost_executor(name, place, why))


class _Clocks:
    """Bounds for the clocks of the hosts, without messages between the hosts.

    A task begins after the driver has sent it and ends before the driver receives its result. Each
    round narrows the possible difference of the two clocks.
    """

    def __init__(self) -> None:
        self._bounds: dict[int, tuple[float, float]] = {}  # driver's clock minus the rank's
        self._hosts: dict[int, str] = {}

    def saw(self, ranks: Mapping[int, RankReport], driver_unix_s: tuple[float, float]) -> None:
        for rank, own in ranks.items():
            if own.task_unix_s is None:
                continue
            if self._hosts.setdefault(rank, own.host) != own.host:
                continue  # it moved to another host; its records name the first
            low, high = self._bounds.get(rank, (-math.inf, math.inf))
            began, ended = own.task_unix_s
            self._bounds[rank] = (
                max(low, driver_unix_s[0] - began),
                min(high, driver_unix_s[1] - ended),
            )

    def relative(self) -> dict[int, ClockOffset]:
        """Return each rank's clock relative to rank 0's; ranks of one host share a clock."""
        found = {}
        for rank, (low, high) in self._bounds.items():
            if self._hosts[rank] == self._hosts[0]:
                found[rank] = SAME_CLOCK
                continue
            low_0, high_0 = self._bounds[0]
            found[rank] = ClockOffset(
                offset_s=(low + high) / 2 - (low_0 + high_0) / 2,
                error_s=(high - low) / 2 + (high_0 - low_0) / 2,
            )
        return found


def _all_done(report: Report) -> bool:
    return all(own.next_step >= own.steps for own in report.ranks.values())


def _carries(report: Report) -> dict[int, Carry]:
    return {r: own.carry for r, own in report.ranks.items() if own.carry is not None}
