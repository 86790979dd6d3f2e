"""Rates by which the configurations of a workload are ranked: speed, or time to a target.

With a target, the rate of a repeat is one over the time in which it reached the target. A repeat
that missed it is censored, not dropped: its time is longer than its training. It counts with the
time of its training, which is a lower bound, so the time of its configuration is one, too. Such a
configuration is behind all that always reached the target. If half of the repeats or more missed
it, there is no time (AlgoPerf: Dahl et al., Benchmarking Neural Network Training Algorithms, 2023,
section 4).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.analysis.compare.row import Row, RowGoal
from paceline.analysis.equivalence.ranks import Statement
from paceline.analysis.statistics.fastest import TIE_MARGIN, Fastest
from paceline.analysis.statistics.intervals import CONFIDENCE, Interval
from paceline.analysis.statistics.rates import RepeatRate, RunRates
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.measure.records.documents import Stopping
from paceline.plan.spec.values import Target
from paceline.plan.trials.trial import Trial

_ROWS_OF_RANKS = (Statement.DATA_PARALLEL, Statement.MEAN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Rates of all configurations of a workload, and how to test their differences.

    target: None if the rates are samples per second. level: family-wise error of the comparison
    with the fastest. margin: of a tie, as a share of the speed.
    """

    rates: RunRates
    level: float = 1 - CONFIDENCE
    margin: float = TIE_MARGIN
    target: Target | None = None
    reached: Mapping[str, int] = field(default_factory=dict)  # number of repeats

    def is_reached(self, configuration: str) -> bool:
        """Tell whether more than half of the repeats reached the target."""
        return 2 * self.reached[configuration] > len(self.rates.repeats[configuration])

    def has_missed(self, configuration: str) -> bool:
        """Tell whether a repeat missed the target, so that its time is a lower bound."""
        if self.target is None:
            return False
        return self.reached[configuration] < len(self.rates.repeats[configuration])

    def fastest(self, names: Iterable[str]) -> Fastest:
        """Compare the named configurations with the fastest of them.

        Those that missed the target in a repeat are left out if others always reached it.
        """
        chosen = list(names)
        chosen = [name for name in chosen if not self.has_missed(name)] or chosen
        return self.rates.fastest(chosen, level=self.level, margin=self.margin)


def rankings(
    trials: Mapping[str, Sequence[TrialAnalysis]], stopping: Stopping | None = None
) -> tuple[Ranking, Ranking | None]:
    """Rank by samples per second, and by the time to the target; None without a target.

    Where samples are doubtful, it is by steps per second.
    stopping: of `repeats = "auto"`, whose last look is repeated.
    """
    level, margin = 1 - CONFIDENCE, TIE_MARGIN
    if stopping is not None and stopping.level is not None:
        level, margin = stopping.level, stopping.tie_margin
    counts = counts_samples(trials)
    rates = rates_of(trials, lambda each: each.samples_per_s if counts else each.steps_per_s)
    by_speed = Ranking(rates=rates, level=level, margin=margin)
    targets = (t.record.trial.training.target for found in trials.values() for t in found)
    target = next(targets, None)
    if target is None:
        return by_speed, None
    reached = {
        name: sum(t.target_time is not None and t.target_time.reached for t in found)
        for name, found in trials.items()
    }
    times = rates_of(
        trials, lambda trial: None if trial.target_time is None else trial.target_time.rate
    )
    return by_speed, Ranking(
        rates=times, level=level, margin=margin, target=target, reached=reached
    )


def counts_samples(trials: Mapping[str, Sequence[TrialAnalysis]]) -> bool:
    """Return whether the samples of all steps are known, and agree where they must.

    A script that trains what one process trains has as many samples in a step as that.
    """
    every = [trial for found in trials.values() for trial in found]
    if not all(trial.steps.samples_known for trial in every):
        return False
    equal = {
        int(trial.steps.samples[0])
        for trial in every
        if len(trial.steps.samples)
        and trial.equivalence is not None
        and trial.equivalence.shown is not None
        and trial.equivalence.shown.statement == Statement.EQUAL
    }
    return len(equal) <= 1


def with_equal_steps(rows: Sequence[Row], *, counts: bool) -> list[Row]:
    """Return the rows; where scripts have a batch for each rank, only one group is ranked.

    It is the largest one with equal samples in a step. counts: samples are known; otherwise ranks
    decide, except where a script trains what one process trains, or nobody knows.
    """
    groups: dict[int, list[Row]] = {}
    for row in rows:
        if row.equivalence.is_script and row.has_comparable_speed:
            groups.setdefault(_size_of_step(row, counts=counts), []).append(row)
    chosen = max(groups, key=lambda size: (len(groups[size]), size), default=0)
    what = "{} samples" if counts else "the rows of {} ranks"
    apart = {
        row.configuration: f"its steps have {what.format(size)}, those of the ranked ones {chosen}"
        for size, own in groups.items()
        for row in own
        if size != chosen
    }
    return [
        replace(row, equivalence=replace(row.equivalence, other_rows=apart.get(row.configuration)))
        for row in rows
    ]


def _size_of_step(row: Row, *, counts: bool) -> int:
    if counts:
        return row.training.global_batch or 0
    return row.placement.ranks if row.equivalence.statement in _ROWS_OF_RANKS else 1


def rates_of(
    trials: Mapping[str, Sequence[TrialAnalysis]],
    rate: Callable[[TrialAnalysis], RepeatRate | None],
) -> RunRates:
    """Return a rate by configuration and repeat."""
    return RunRates(
        {
            name: {
                t.repeat: replace(
                    found, is_loaded=t.disturbance is not None and t.disturbance.is_load
                )
                for t in repeats
                if (found := rate(t)) is not None
            }
            for name, repeats in trials.items()
        }
    )


def speedup_of(configuration: str, baseline: Trial | None, rates: RunRates) -> Interval | None:
    """Return the rate of a configuration over that of the baseline."""
    if baseline is None:
        return None
    if configuration == baseline.configuration:
        return Interval(estimate=1.0, low=1.0, high=1.0)
    return rates.ratio(configuration, baseline.configuration)


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


def row_goal(
    configuration: str,
    trials: Sequence[TrialAnalysis],
    ranking: Ranking | None,
    baseline: Trial | None,
) -> RowGoal:
    """Return what a row says about the target.

    The time needs more than half of the repeats. Its upper bound is infinite if one missed the
    target.
    """
    if ranking is None or ranking.target is None:
        return RowGoal()
    reached = ranking.reached[configuration]
    goal = RowGoal(target=ranking.target.words, target_reached=reached)
    rate = ranking.rates.rate(configuration)
    if rate is None or not ranking.is_reached(configuration):
        return goal
    time = rate.inverse()
    if reached < len(trials):
        time = Interval(estimate=time.estimate, low=time.low, high=math.inf)
    has_base = baseline is not None and ranking.is_reached(baseline.configuration)
    steps = [t.target_time.steps for t in trials if t.target_time is not None]
    base = baseline if has_base else None
    return replace(
        goal,
        time_to_target_s=time,
        steps_to_target=statistics.median(steps),
        target_speedup=speedup_of(configuration, base, ranking.rates),
    )
