"""The difference in step time of two configurations, by part, with intervals.

Means over steps and repeats are used, because means add up and medians do not. The noise between
repeats is estimated for each part from all configurations of the workload, as a share of their step
times (paceline.analysis.statistics.layout). Intervals are those of Student's t. With one repeat the
noise is unknown, so no difference is significant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.analysis.explain.parts import PART_NAMES, PARTS, parts_of_phases
from paceline.analysis.statistics.intervals import (
    CONFIDENCE,
    Estimate,
    Mean,
    estimate,
    mean_interval,
    satterthwaite,
    welch_difference,
)
from paceline.analysis.statistics.layout import Layout, fit_layout, log_speed, values_table
from paceline.analysis.trial.phases import mean_over_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from paceline.analysis.explain.parts import TrialParts
    from paceline.analysis.trial_analysis import TrialAnalysis

    Values = Mapping[str, Mapping[int, float]]  # shares of a step, by configuration and repeat

TOTAL = "total"
# Naming a cause is a claim, and most pairs have none: a stricter level than that of the intervals.
_CLAIM_CONFIDENCE = 0.99
_LEAST_SHARE = 0.01  # of a step: smaller differences have no cause worth naming


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDifference:
    """One part in two configurations, seconds per step."""

    part: str
    label: str
    faster_s: float
    slower_s: float
    difference_s: Mean
    share: float | None  # of the whole difference; None where that is not significant


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The whole difference and its parts, which add up to it."""

    faster_s: float
    slower_s: float
    difference_s: Mean
    is_significant: bool
    repeats: int  # common to both; 0: different runs, not paired
    parts: tuple[PartDifference, ...]

    def part(self, name: str) -> PartDifference:
        return self.parts[PART_NAMES.index(name)]


class PartNoise:
    """Noise between repeats of one part, or of the whole, as a share of the step time."""

    def __init__(self, layouts: Mapping[str, tuple[Layout, int]]) -> None:
        """layouts: by configuration, the fitted run that it is in, and its number there."""
        self._layouts = layouts

    @classmethod
    def of_run(cls, values: Values) -> PartNoise:
        layout = fit_layout(values_table(values))
        return cls({name: (layout, number) for number, name in enumerate(values)})

    def paired(
        self, names: tuple[str, str], scales: tuple[float, float], repeats: int
    ) -> tuple[float, float] | None:
        """Return the error of a difference within common repeats, and its degrees of freedom.

        scales: step times, by which the shares are multiplied. None if the noise is unknown.
        """
        found = [self._layouts.get(name) for name in names]
        known = [each for each in found if each is not None]
        if len(known) < len(names) or any(layout.degrees <= 0 for layout, _ in known):
            return None
        shared, variances, degrees = 0.0, [], []
        for (layout, number), scale in zip(known, scales, strict=True):
            variance, free = layout.noise_of(number)
            if layout.has_own[number]:
                variances.append(variance * scale**2 / repeats)
                degrees.append(free)
            else:
                shared += variance * scale**2 / repeats
        if shared or not variances:
            variances.append(shared)
            degrees.append(known[0][0].degrees)
        return _sum_of_variances(variances, degrees)

    def apart(
        self, names: tuple[str, str], scales: tuple[float, float]
    ) -> tuple[float, float] | None:
        """Return the same for trials without a common repeat, where nothing cancels."""
        variances, degrees = [], []
        for name, scale in zip(names, scales, strict=True):
            layout, number = self._layouts.get(name, (None, 0))
            found = None if layout is None else log_speed(layout, number)
            if found is None or found.degrees <= 0:
                return None
            variances.append((found.error * scale) ** 2)
            degrees.append(found.degrees)
        return _sum_of_variances(variances, degrees)


def _sum_of_variances(variances: list[float], degrees: list[float]) -> tuple[float, float]:
    total = satterthwaite(np.array(variances), np.array(degrees))
    return math.sqrt(sum(variances)), float(total)


def part_noise(configurations: Mapping[str, Sequence[TrialAnalysis]]) -> dict[str, PartNoise]:
    """Estimate the noise between repeats of each part, and of the whole.

    configurations: all finished trials of one workload, by configuration.
    """
    return {
        name: PartNoise.of_run(found) for name, found in _relative_parts(configurations).items()
    }


def noise_of_two_runs(
    runs: Mapping[str, tuple[str, Mapping[str, Sequence[TrialAnalysis]]]],
) -> dict[str, PartNoise]:
    """Estimate the same noise for one configuration in two runs, between which nothing cancels.

    runs: by the name of the side, its configuration and the finished trials of the workload.
    """
    layouts: dict[str, dict[str, tuple[Layout, int]]] = {}
    for side, (configuration, trials) in runs.items():
        for part, values in _relative_parts(trials).items():
            if configuration in values:
                number = list(values).index(configuration)
                layout = fit_layout(values_table(values))
                layouts.setdefault(part, {})[side] = (layout, number)
    return {part: PartNoise(found) for part, found in layouts.items()}


def _relative_parts(
    configurations: Mapping[str, Sequence[TrialAnalysis]],
) -> dict[str, dict[str, dict[int, float]]]:
    """Return each part, and the whole, as a share of the mean step: by configuration and repeat."""
    values: dict[str, dict[str, dict[int, float]]] = {}
    for configuration, trials in configurations.items():
        found = {trial.repeat: _shares(trial) for trial in trials if trial.phases}
        step_s = float(np.mean([sum(shares.values()) for shares in found.values()] or [0.0]))
        if step_s <= 0:
            continue
        for repeat, parts in found.items():
            for name, seconds in {**parts, TOTAL: sum(parts.values())}.items():
                of_part = values.setdefault(name, {}).setdefault(configuration, {})
                of_part[repeat] = seconds / step_s
    return values


def difference(
    faster: Mapping[int, TrialParts],
    slower: Mapping[int, TrialParts],
    noise: Mapping[str, PartNoise],
    names: tuple[str, str],
    *,
    paired: bool = True,
) -> Difference:
    """Return the difference of two configurations; common repeats are paired.

    faster, slower: by repeat, at least one each. noise: from `part_noise`, with the names of both.
    paired: False for trials of different runs, whose repeats have nothing in common.
    """
    common = sorted(set(faster) & set(slower)) if paired else []
    sides = [
        np.stack([side[repeat].means for repeat in (common or side)]) for side in (faster, slower)
    ]
    step_s = [side.mean(axis=0) for side in sides]
    scales = float(step_s[0].sum()), float(step_s[1].sum())

    def interval(name: str, *, confidence: float = CONFIDENCE) -> Mean:
        ours, theirs = (_values_of(side, name) for side in sides)
        found = noise.get(name)
        error = None
        if found is not None and (ours.any() or theirs.any()):
            of_pair = found.paired(names, scales, len(common)) if common else None
            error = of_pair if common else found.apart(names, scales)
        return _interval(ours, theirs, error, confidence, paired=bool(common)).as_mean()

    whole, claim = interval(TOTAL), interval(TOTAL, confidence=_CLAIM_CONFIDENCE)
    significant = claim.low * claim.high > 0 and abs(whole.mean) >= _LEAST_SHARE * scales[0]
    parts = [
        PartDifference(
            part=part.name,
            label=part.label,
            faster_s=float(step_s[0][row]),
            slower_s=float(step_s[1][row]),
            difference_s=(of_part := interval(part.name)),
            share=of_part.mean / whole.mean if significant else None,
        )
        for row, part in enumerate(PARTS)
    ]
    return Difference(
        faster_s=scales[0],
        slower_s=scales[1],
        difference_s=whole,
        is_significant=significant,
        repeats=len(common),
        parts=tuple(parts),
    )


def _values_of(side: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    """Return the seconds of a part, or of the whole, by repeat."""
    found: NDArray[np.float64] = (
        side.sum(axis=1) if name == TOTAL else side[:, PART_NAMES.index(name)]
    )
    return found


def _interval(
    ours: NDArray[np.float64],
    theirs: NDArray[np.float64],
    error: tuple[float, float] | None,
    confidence: float,
    *,
    paired: bool,
) -> Estimate:
    """Return theirs - ours in seconds.

    error: with its degrees of freedom; without it, that of the repeats themselves.
    """
    if error is not None:
        return estimate(float(theirs.mean() - ours.mean()), *error, confidence)
    if paired:
        found = mean_interval(theirs - ours, confidence)
        return found or estimate(0.0, math.inf, 0)
    first, second = mean_interval(ours), mean_interval(theirs)
    if first is None or second is None:
        return estimate(0.0, math.inf, 0)
    return welch_difference(first, second, confidence)


def _shares(trial: TrialAnalysis) -> dict[str, float]:
    return parts_of_phases(mean_over_ranks([rank.step for rank in trial.phases]))
