"""The search: brackets of candidates, measured rung by rung, with the trials of all targets
interleaved."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.plan.planning import repeated
from paceline.tune.halving import SuccessiveHalving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline.analysis.statistics.rates import RepeatRate
    from paceline.plan.trial import Trial
    from paceline.spec import TuneSettings
    from paceline.tune.measurement import Measurement, Measurer
    from paceline.tune.spaces import Target


@dataclass
class Measurements:
    """All measurements by configuration and repeat."""

    rates: dict[str, dict[int, RepeatRate]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, trial: Trial, measured: Measurement) -> None:
        if measured.samples_per_s is None:
            self.failures[trial.configuration] = measured.failure or "it failed"
        else:
            found = self.rates.setdefault(trial.configuration, {})
            found[trial.repeat] = measured.samples_per_s

    def speed(self, configuration: str, repeats: Iterable[int]) -> float:
        """Return the geometric mean over these repeats in samples/s.

        NaN if it failed or a repeat is missing.
        """
        found, wanted = self.rates.get(configuration, {}), list(repeats)
        if configuration in self.failures or any(r not in found for r in wanted):
            return math.nan
        return math.exp(statistics.fmean(found[r].log_rate for r in wanted))


class Bracket:
    """Candidates for one target, of which the fastest is sought by successive halving."""

    first_repeat = 0  # the first repeat that counts for the decision

    def __init__(
        self,
        target: Target,
        candidates: Sequence[Trial],
        settings: TuneSettings,
        *,
        round_number: int = 0,
    ) -> None:
        self.target = target
        self.candidates = {trial.configuration: trial for trial in candidates}
        self.round_number = round_number
        self.cut_short = False
        # without a choice, the final measures it as often as needed
        repeats = 1 if len(self.candidates) == 1 else settings.repeats
        self._halving = SuccessiveHalving(
            list(self.candidates), keep=settings.reduction_factor, repeats=repeats
        )
        self._have = 0

    @property
    def finished(self) -> bool:
        return self._halving.finished

    @property
    def best(self) -> Trial | None:
        name = self._halving.best
        return None if name is None else self.candidates[name]

    def due(self, measured: Measurements) -> list[Trial]:
        """Return the trials that this rung still needs; a failed candidate is not measured
        again."""
        return [
            repeated(self.candidates[name], repeat)
            for repeat in range(self._have, self._halving.wanted)
            for name in self._halving.alive
            if name not in measured.failures
        ]

    def judge(self, measured: Measurements) -> None:
        wanted = self._halving.wanted
        self._halving.report({n: measured.speed(n, range(wanted)) for n in self._halving.alive})
        self._have = wanted


class FinalBracket(Bracket):
    """A winner against the default, both measured again alternately.

    The fastest of many looks faster than it is (a maximum over noise), and it was measured at
    another time than the default. Here neither effect counts.
    """

    def __init__(self, target: Target, candidates: Sequence[Trial], settings: TuneSettings) -> None:
        """candidates: the winner is the last one."""
        super().__init__(target, candidates, settings)
        self.first_repeat = settings.repeats
        self._repeats = range(settings.repeats, 2 * settings.repeats)
        self._best: Trial | None = None
        self._judged = False

    @property
    def finished(self) -> bool:
        return self._judged

    @property
    def best(self) -> Trial | None:
        return self._best

    def due(self, measured: Measurements) -> list[Trial]:
        return [
            repeated(trial, repeat)
            for repeat in self._repeats
            for name, trial in self.candidates.items()
            if name not in measured.failures
        ]

    def judge(self, measured: Measurements) -> None:
        # The winner is reported also if it is slower this time, because that is the result.
        working = [n for n in self.candidates if math.isfinite(measured.speed(n, self._repeats))]
        self._best = self.candidates[working[-1]] if working else None
        self._judged = True


def search(
    brackets: Sequence[Bracket],
    measurer: Measurer,
    measured: Measurements,
    follow: Callable[[Bracket], Bracket | None],
    *,
    seed: int,
) -> list[Bracket]:
    """Measure rung by rung until every bracket has a winner, or the time budget is spent.

    follow: returns the bracket that starts from the winner of a finished one, if any.
    Return all brackets, and add the measurements to `measured`.
    """
    every, running = list(brackets), list(brackets)
    while running:
        block = [trial for bracket in running for trial in bracket.due(measured)]
        if not _measure(interleaved(block, seed), measurer, measured):
            for bracket in running:
                bracket.cut_short = True
            break
        for bracket in running:
            bracket.judge(measured)
        followers = [follow(bracket) for bracket in running if bracket.finished]
        new = [bracket for bracket in followers if bracket is not None]
        every += new
        running = [bracket for bracket in running if not bracket.finished] + new
    return every


def interleaved(trials: Iterable[Trial], seed: int) -> list[Trial]:
    """Order trials repeat by repeat, each repeat in a seeded random order with the baselines first,
    because every other trial is compared with them as soon as it ends."""
    drawn = random.Random(seed)  # noqa: S311  (an order, not a secret)
    unique = list({trial.id: trial for trial in trials}.values())
    drawn.shuffle(unique)
    return sorted(unique, key=lambda trial: (trial.repeat, not trial.is_baseline))


def _measure(block: Sequence[Trial], measurer: Measurer, measured: Measurements) -> bool:
    for number, trial in enumerate(block, start=1):
        found = measurer.measure(trial, number, len(block))
        if found is None:
            return False
        measured.add(trial, found)
    return True
