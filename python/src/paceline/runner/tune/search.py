"""The search: brackets of candidates, measured rung by rung, with the trials of all targets
interleaved."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paceline.analysis.statistics.rates import RepeatRate
from paceline.plan.spec import TuneSettings
from paceline.plan.trials.planning import repeated
from paceline.plan.trials.trial import Trial
from paceline.runner.tune.measurement import MeasuredRate, TrialMeasurer
from paceline.runner.tune.spaces import SearchTarget


@dataclass
class Measurements:
    """All measurements by configuration and repeat."""

    rates: dict[str, dict[int, RepeatRate]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, trial: Trial, measured: MeasuredRate) -> None:
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
    """Candidates for one target, of which the fastest is sought by successive halving.

    All candidates of a rung are measured equally often, and the fastest go on to the next rung
    (Jamieson, Talwalkar: Non-stochastic Best Arm Identification and Hyperparameter Optimization,
    AISTATS 2016). The first candidate is the default: it goes on as long as it works. The state
    follows from the measurements alone, so a search that is resumed decides the same again.
    """

    is_final = False

    def __init__(
        self,
        target: SearchTarget,
        candidates: Sequence[Trial],
        settings: TuneSettings,
        *,
        round_number: int = 0,
    ) -> None:
        self.target = target
        self.candidates = {trial.configuration: trial for trial in candidates}
        self.round_number = round_number
        self.cut_short = False
        self.finished = False
        self.best: Trial | None = None  # the fastest of the last rung; None if all failed
        self._alive = list(self.candidates)
        self._keep = settings.reduction_factor
        # without a choice, the final measures it as often as needed
        self._most_repeats = 1 if len(self.candidates) == 1 else settings.repeats
        self._repeats = range(1)  # of this rung
        self.counted = range(settings.repeats)  # repeats of its candidates that decide

    def due(self, measured: Measurements) -> list[Trial]:
        """Return the trials that this rung still needs; a failed candidate is not measured
        again."""
        return [
            repeated(self.candidates[name], repeat)
            for repeat in self._repeats
            for name in self._alive
            if name not in measured.failures
        ]

    def judge(self, measured: Measurements) -> None:
        """End the rung."""
        count = self._repeats.stop
        speeds = self._speeds(measured, range(count))
        ranked = sorted(speeds, key=speeds.__getitem__, reverse=True)
        self.best = self.candidates[ranked[0]] if ranked else None
        self.finished = not ranked or count * self._keep > self._most_repeats
        going_on = {next(iter(self.candidates)), *ranked[: math.ceil(len(ranked) / self._keep)]}
        self._alive = [name for name in speeds if name in going_on]
        self._repeats = range(count, count * self._keep)

    def _speeds(self, measured: Measurements, repeats: range) -> dict[str, float]:
        """Return the speeds of the candidates of this rung that work."""
        speeds = {name: measured.speed(name, repeats) for name in self._alive}
        return {name: speed for name, speed in speeds.items() if math.isfinite(speed)}


class FinalBracket(Bracket):
    """A winner against the default, both measured again alternately.

    The fastest of many looks faster than it is (a maximum over noise), and it was measured at
    another time than the default. Here neither effect counts.
    """

    is_final = True

    def __init__(
        self, target: SearchTarget, candidates: Sequence[Trial], settings: TuneSettings
    ) -> None:
        """candidates: the winner is the last one."""
        super().__init__(target, candidates, settings)
        self._repeats = self.counted = range(settings.repeats, 2 * settings.repeats)

    def judge(self, measured: Measurements) -> None:
        # The winner is reported also if it is slower this time, because that is the result.
        working = list(self._speeds(measured, self._repeats))
        self.best = self.candidates[working[-1]] if working else None
        self.finished = True


def search(
    brackets: Sequence[Bracket],
    measurer: TrialMeasurer,
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


def _measure(block: Sequence[Trial], measurer: TrialMeasurer, measured: Measurements) -> bool:
    for number, trial in enumerate(block, start=1):
        found = measurer.measure(trial, number, len(block))
        if found is None:
            return False
        measured.add(trial, found)
    return True
