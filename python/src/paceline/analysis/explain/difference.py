"""The difference in step time of two configurations, by part, with intervals.

Means over steps and repeats are used, because means add up and medians do not. The interval of a
mean difference comes from the block-hierarchical bootstrap of paceline.analysis.statistics.series,
and no bound is nearer to the mean than Student's t puts it for the run-to-run noise. That noise is
estimated for each part and configuration, with the help of all configurations of the workload
(paceline.analysis.statistics.noise), relative to their step times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.analysis.explain.parts import PART_NAMES, PARTS, parts_of_phases
from paceline.analysis.statistics.noise import (
    CONFIDENCE,
    RunNoise,
    RunNoises,
    noise_between_runs,
    t_quantile,
    total_noise_of,
)
from paceline.analysis.statistics.resampling import bootstrap_means
from paceline.analysis.statistics.series import Mean
from paceline.analysis.trial.phases import mean_over_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from paceline.analysis.explain.parts import TrialParts
    from paceline.analysis.trial_analysis import TrialAnalysis

    PartNoise = Mapping[str, RunNoises]

TOTAL = "total"
# Naming a cause is a claim, and most pairs have none: a stricter level than that of the intervals.
_CLAIM_CONFIDENCE = 0.99
_LEAST_SHARE = 0.01  # of a step: smaller differences have no cause worth naming
# Without repeats the noise between runs is unknown. Single runs of equal configurations differ by
# some percent, so a difference must exceed this share of a step.
_SINGLE_REPEAT = 0.05


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


def part_noise(configurations: Mapping[str, Sequence[TrialAnalysis]]) -> dict[str, RunNoises]:
    """Estimate the run-to-run noise of each part, and of the whole, as a share of the step time.

    configurations: all finished trials of one workload, by configuration.
    """
    return {
        name: noise_between_runs(found) for name, found in _relative_parts(configurations).items()
    }


def noise_of_two_runs(
    runs: Mapping[str, Mapping[str, Sequence[TrialAnalysis]]],
) -> dict[str, RunNoises]:
    """Estimate the same noise for one configuration in two runs, between which nothing cancels.

    runs: by the name of the side, the finished trials of the workload by configuration. A run of
    one repeat is taken to have the noise of the other one.
    """
    parts = {side: _relative_parts(trials) for side, trials in runs.items()}
    return {
        name: _apart({side: list(found.get(name, {}).values()) for side, found in parts.items()})
        for name in dict.fromkeys(name for found in parts.values() for name in found)
    }


def _apart(values: Mapping[str, Sequence[Mapping[int, float]]]) -> RunNoises:
    known = {side: found for side in values if (found := total_noise_of(values[side])) is not None}
    if not known:
        return RunNoises(pooled=None)
    variance = float(np.mean([noise.deviation**2 for noise in known.values()]))
    degrees = sum(noise.degrees for noise in known.values())
    return RunNoises(pooled=RunNoise(deviation=math.sqrt(variance), degrees=degrees), own=known)


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
    noise: PartNoise,
    names: tuple[str, str],
    *,
    paired: bool = True,
) -> Difference:
    """Return the difference of two configurations; common repeats are paired.

    faster, slower: by repeat, at least one each. noise: from `part_noise`, with the names of both.
    paired: False for trials of different runs, whose repeats have nothing in common.
    """
    common = sorted(set(faster) & set(slower)) if paired else []
    step_s = [_mean(list(side.values())) for side in (faster, slower)]
    if common:
        step_s = [_mean([side[repeat] for repeat in common]) for side in (faster, slower)]
        means = np.stack([slower[r].means - faster[r].means for r in common])
        draws = bootstrap_means(np.stack([slower[r].draws - faster[r].draws for r in common]))
        repeats = float(len(common))
    else:
        means = (step_s[1] - step_s[0])[None, :]
        # rolled, so that both sides draw different repeats
        draws = _unpaired(slower) - np.roll(_unpaired(faster), 1, axis=0)
        repeats = 2 / (1 / len(faster) + 1 / len(slower))
    scales = float(step_s[0].sum()), float(step_s[1].sum())
    of_pair = {name: found.of_difference(*names, scales) for name, found in noise.items()}
    totals = means.sum(axis=1), draws.sum(axis=1), of_pair.get(TOTAL), repeats
    whole, claim = _interval(*totals), _interval(*totals, _CLAIM_CONFIDENCE)
    is_noise_known = len(means) > 1 or of_pair.get(TOTAL) is not None
    least = _LEAST_SHARE if is_noise_known else _SINGLE_REPEAT
    significant = claim.low * claim.high > 0 and abs(whole.mean) >= least * float(step_s[0].sum())
    return Difference(
        faster_s=float(step_s[0].sum()),
        slower_s=float(step_s[1].sum()),
        difference_s=whole,
        is_significant=significant,
        repeats=len(common),
        parts=tuple(
            PartDifference(
                part=part.name,
                label=part.label,
                faster_s=float(step_s[0][row]),
                slower_s=float(step_s[1][row]),
                difference_s=_interval(
                    means[:, row],
                    draws[:, row],
                    of_pair.get(part.name) if step_s[0][row] or step_s[1][row] else None,
                    repeats,
                ),
                share=float(means[:, row].mean()) / whole.mean if significant else None,
            )
            for row, part in enumerate(PARTS)
        ),
    )


def _shares(trial: TrialAnalysis) -> dict[str, float]:
    return parts_of_phases(mean_over_ranks([rank.step for rank in trial.phases]))


def _mean(parts: Sequence[TrialParts]) -> NDArray[np.float64]:
    mean: NDArray[np.float64] = np.mean([each.means for each in parts], axis=0)
    return mean


def _unpaired(side: Mapping[int, TrialParts]) -> NDArray[np.float64]:
    return bootstrap_means(np.stack([each.draws for each in side.values()]))


def _interval(
    means: NDArray[np.float64],
    draws: NDArray[np.float64],
    noise: RunNoise | None,
    repeats: float,
    confidence: float = CONFIDENCE,
) -> Mean:
    """Return the mean difference with its interval.

    means: by repeat. draws: of their mean. noise: of one repeat, in seconds; without it, that of
    the repeats themselves. repeats: of which the noise is the mean.
    """
    centre = float(means.mean())
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    least = 0.0
    if noise is None and len(means) > 1:
        noise = RunNoise(deviation=float(np.std(means, ddof=1)), degrees=len(means) - 1)
    if noise is not None:
        least = t_quantile(noise.degrees, confidence) * noise.deviation / math.sqrt(repeats)
    return Mean(
        mean=centre, low=min(float(low), centre - least), high=max(float(high), centre + least)
    )
