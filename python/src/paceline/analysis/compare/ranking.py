"""Rates by which the configurations of a workload are ranked: speed, or time to a target.

With a target, the rate of a repeat is one over the time in which it reached the target. A repeat
that missed it is censored, not dropped: its time is longer than its training. It counts with the
time of its training, which is a lower bound. The median over repeats is exact as long as more than
half of them reached the target; otherwise there is none, as if missed targets took infinitely long
(AlgoPerf: Dahl et al., Benchmarking Neural Network Training Algorithms, 2023, section 4).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.analysis.statistics.noise import CONFIDENCE, RunNoises, run_noise
from paceline.analysis.statistics.pairwise import Pairwise
from paceline.analysis.statistics.resampling import Series
from paceline.analysis.statistics.series import Interval, median_interval, ratio_interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.analysis.trial_analysis import TrialAnalysis
    from paceline.plan.trial import Trial
    from paceline.spec.tables import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Rates of all configurations of a workload, by configuration and repeat.

    target: None if the rates are samples per second.
    """

    rates: Mapping[str, Mapping[int, Series]]
    noises: RunNoises
    target: Target | None = None
    reached: Mapping[str, int] = field(default_factory=dict)  # number of repeats

    def is_reached(self, configuration: str) -> bool:
        """Tell whether more than half of the repeats reached the target."""
        return 2 * self.reached[configuration] > len(self.rates[configuration])

    def ratio(self, faster: str, slower: str) -> Interval | None:
        noise = self.noises.of_ratio(faster, slower)
        return ratio_interval(self.rates[faster], self.rates[slower], noise)

    def pairs(self, names: Sequence[str], level: float | None) -> Pairwise:
        """Compare all pairs of `names`. level: of the whole family of tests; None: the usual."""
        return Pairwise(names, self.rates, self.noises, level or 1 - CONFIDENCE)


def progress_by_speed(trials: Mapping[str, Sequence[TrialAnalysis]]) -> Progress:
    rates = {
        name: {t.repeat: t.samples_per_s for t in found if t.samples_per_s is not None}
        for name, found in trials.items()
    }
    return Progress(rates=rates, noises=run_noise(rates))


def progress_to_target(trials: Mapping[str, Sequence[TrialAnalysis]]) -> Progress | None:
    """Return the rates at which the target was reached; None if the workload has no target."""
    targets = (t.record.trial.training.target for found in trials.values() for t in found)
    target = next(targets, None)
    if target is None:
        return None
    rates = {
        name: {t.repeat: t.target_time.rate for t in found if t.target_time}
        for name, found in trials.items()
    }
    reached = {
        name: sum(t.target_time is not None and t.target_time.reached for t in found)
        for name, found in trials.items()
    }
    # a censored time says nothing about the noise
    complete = {name: found for name, found in rates.items() if reached[name] == len(found)}
    return Progress(rates=rates, noises=run_noise(complete), target=target, reached=reached)


def speedup_of(configuration: str, baseline: Trial | None, progress: Progress) -> Interval | None:
    """Return the rate of a configuration over that of the baseline."""
    if baseline is None:
        return None
    if configuration == baseline.configuration:
        return Interval(median=1.0, low=1.0, high=1.0)
    return progress.ratio(configuration, baseline.configuration)


def last_metrics(trials: Sequence[TrialAnalysis]) -> dict[str, float]:
    """Return the median over repeats of each metric at the last evaluation.

    A metric that is not finite in a repeat is left out: JSON has no such numbers.
    """
    found = [t.evaluations.metrics for t in trials if t.evaluations is not None]
    names = dict.fromkeys(name for metrics in found for name in metrics)
    last = {name: [float(m[name][-1]) for m in found if name in m] for name in names}
    return {
        name: statistics.median(values)
        for name, values in last.items()
        if all(map(math.isfinite, values))
    }


def target_fields(
    configuration: str,
    trials: Sequence[TrialAnalysis],
    progress: Progress | None,
    baseline: Trial | None,
) -> dict[str, Any]:
    """Return the fields of a row about the target; none without a target.

    The median needs more than half of the repeats. Its upper bound is infinite if one missed the
    target.
    """
    if progress is None or progress.target is None:
        return {}
    reached = progress.reached[configuration]
    fields: dict[str, Any] = {"target": progress.target.words, "target_reached": reached}
    rate = median_interval(progress.rates[configuration], progress.noises.of(configuration))
    if rate is None or not progress.is_reached(configuration):
        return fields
    high = 1 / rate.low if reached == len(trials) else math.inf
    has_base = baseline is not None and progress.is_reached(baseline.configuration)
    steps = [t.target_time.steps for t in trials if t.target_time is not None]
    return fields | {
        "time_to_target_s": Interval(median=1 / rate.median, low=1 / rate.high, high=high),
        "steps_to_target": statistics.median(steps),
        "target_speedup": speedup_of(configuration, baseline if has_base else None, progress),
    }
