"""The search: contests of candidates, rung by rung, all strategies' trials interleaved."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.tune.candidates import repeated
from paceline.tune.halving import Halving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline.analysis.statistics import Series
    from paceline.plan.trial import Trial
    from paceline.spec import LocalStrategy, TuneSettings
    from paceline.tune.measuring import Bench, Measurement


@dataclass
class Measurements:
    """All that was measured, by configuration and repeat."""

    series: dict[str, dict[int, Series]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, trial: Trial, measured: Measurement) -> None:
        if measured.images_per_s is None:
            self.failures[trial.configuration] = measured.failure or "it failed"
        else:
            found = self.series.setdefault(trial.configuration, {})
            found[trial.repeat] = measured.images_per_s

    def speed(self, configuration: str, repeats: int) -> float:
        """Median over its first so many repeats, in images/s; nan if it failed or lacks one."""
        found = self.series.get(configuration, {})
        if configuration in self.failures or any(r not in found for r in range(repeats)):
            return math.nan
        return math.exp(statistics.median(found[r].log_median for r in range(repeats)))


class Contest:
    """Candidates of one strategy on one workload, of which one is to be the fastest.

    follows: the contest whose winner this one started from.
    """

    def __init__(
        self,
        candidates: Sequence[Trial],
        settings: TuneSettings,
        *,
        follows: Contest | None = None,
    ) -> None:
        self.candidates = {trial.configuration: trial for trial in candidates}
        self.follows = follows
        self.cut_short = False
        first = candidates[0]
        self.workload: str = first.training.workload
        self.strategy: LocalStrategy = first.local_strategy
        # the baseline has no rival, and is the slowest to measure
        repeats = 1 if first.is_baseline else settings.repeats
        self._halving = Halving(list(self.candidates), keep=settings.keep, repeats=repeats)
        self._have = 0

    @property
    def finished(self) -> bool:
        return self._halving.finished

    @property
    def best(self) -> Trial | None:
        name = self._halving.best
        return None if name is None else self.candidates[name]

    def due(self, measured: Measurements) -> list[Trial]:
        """What the present rung still wants; a candidate that failed is asked for no more."""
        return [
            repeated(self.candidates[name], repeat)
            for repeat in range(self._have, self._halving.wanted)
            for name in self._halving.alive
            if name not in measured.failures
        ]

    def judge(self, measured: Measurements) -> None:
        wanted = self._halving.wanted
        self._halving.report({n: measured.speed(n, wanted) for n in self._halving.alive})
        self._have = wanted


def search(
    contests: Sequence[Contest],
    bench: Bench,
    refine: Callable[[Contest], Contest | None],
    *,
    seed: int,
) -> tuple[list[Contest], Measurements]:
    """Measure rung by rung until every contest has its winner, or the bench has no time left.

    refine: the contest that follows a finished one, if any.
    """
    measured = Measurements()
    every, running = list(contests), list(contests)
    while running:
        block = [trial for contest in running for trial in contest.due(measured)]
        if not _measure(interleaved(block, seed), bench, measured):
            for contest in running:
                contest.cut_short = True
            break
        for contest in running:
            contest.judge(measured)
        followers = [refine(contest) for contest in running if contest.finished]
        new = [contest for contest in followers if contest is not None]
        every += new
        running = [contest for contest in running if not contest.finished] + new
    return every, measured


def interleaved(trials: Iterable[Trial], seed: int) -> list[Trial]:
    """Repeat by repeat, each in an order drawn from the seed but for the baselines, which lead:
    every other trial is held against them as soon as it ends."""
    drawn = random.Random(seed)  # noqa: S311  (an order, not a secret)
    unique = list({trial.id: trial for trial in trials}.values())
    drawn.shuffle(unique)
    return sorted(unique, key=lambda trial: (trial.repeat, not trial.is_baseline))


def _measure(block: Sequence[Trial], bench: Bench, measured: Measurements) -> bool:
    for number, trial in enumerate(block, start=1):
        found = bench.measure(trial, number, len(block))
        if found is None:
            return False
        measured.add(trial, found)
    return True
