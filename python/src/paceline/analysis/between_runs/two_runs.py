"""Compare two runs: before and after a change, two machines, or two versions.

Rows are paired by the name of the configuration. Repeats of different runs have nothing in common,
so no drift of the machine cancels as it does within a run. Therefore the noise is the whole
deviation between the repeats of a run (`total_noise`). All pairs of a workload are tested together
(Holm). A difference between two runs may still come from the state of the machine at that time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy

from paceline.analysis.statistics.noise import (
    CONFIDENCE,
    RunNoise,
    median_efficiency,
    t_quantile,
    total_noise,
)
from paceline.analysis.statistics.pairwise import holm
from paceline.analysis.statistics.resampling import bootstrap_medians
from paceline.analysis.statistics.series import Interval, median_interval
from paceline.records.files import jsonable
from paceline.records.rows import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.analysis.between_runs.speeds import Speeds
    from paceline.analysis.statistics.resampling import Series

_SEED = 20220131


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRow:
    """One configuration in two runs."""

    configuration: str
    workload: str
    before: Interval  # samples per second in the first run
    after: Interval  # in the second run
    ratio: Interval  # after / before
    is_different: bool  # significant at 5 % in the family of the workload
    equivalent: tuple[bool | None, bool | None]  # to the baseline of its own run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Two runs: rows in both, and configurations in one of them only."""

    rows: tuple[PairedRow, ...]  # the largest ratio first, by workload
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    @property
    def faster(self) -> list[PairedRow]:
        return [row for row in self.rows if row.is_different and row.ratio.median > 1]

    @property
    def slower(self) -> list[PairedRow]:
        return [row for row in self.rows if row.is_different and row.ratio.median < 1]

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = jsonable(
            {
                "schema": SCHEMA,
                "rows": self.rows,
                "only_before": self.only_before,
                "only_after": self.only_after,
            }
        )
        return document


def compare_runs(before: Speeds, after: Speeds) -> RunComparison:
    """Pair the configurations of two runs and test each pair."""
    rows: list[PairedRow] = []
    for workload in before.workloads:
        rows += _paired_rows(workload, before, after)
    return RunComparison(
        rows=tuple(rows),
        only_before=tuple(name for name in before.rates if name not in after.rates),
        only_after=tuple(name for name in after.rates if name not in before.rates),
    )


def _paired_rows(workload: str, before: Speeds, after: Speeds) -> list[PairedRow]:
    ours, theirs = before.of_workload(workload), after.of_workload(workload)
    noises = total_noise(list(ours.values())), total_noise(list(theirs.values()))
    names = [name for name in ours if name in theirs]
    # a run of one repeat is taken to have the noise of the other one
    of_both = noises[0] or noises[1], noises[1] or noises[0]
    tests = [_ratio(ours[name], theirs[name], *of_both) for name in names]
    different = holm(np.array([p_value for _, p_value in tests]), 1 - CONFIDENCE)
    rows = []
    for name, (ratio, _), is_different in zip(names, tests, different.tolist(), strict=True):
        speeds = median_interval(ours[name], noises[0]), median_interval(theirs[name], noises[1])
        if speeds[0] is None or speeds[1] is None:
            continue
        rows.append(
            PairedRow(
                configuration=name,
                workload=workload,
                before=speeds[0],
                after=speeds[1],
                ratio=ratio,
                is_different=is_different,
                equivalent=(before.equivalent[name], after.equivalent[name]),
            )
        )
    return sorted(rows, key=lambda row: -row.ratio.median)


def _ratio(
    before: Mapping[int, Series],
    after: Mapping[int, Series],
    noise_before: RunNoise | None,
    noise_after: RunNoise | None,
) -> tuple[Interval, float]:
    """Return after / before with its interval, and the two-sided p-value of no difference.

    The interval is that of a bootstrap over the repeats of each run and their steps, but no bound
    is nearer to the ratio than Student's t puts it for the noise.
    """
    ours, theirs = _Sample(before, noise_before), _Sample(after, noise_after)
    centre = theirs.median - ours.median
    # `bootstrap_medians` chooses the same repeats each time; different runs need their own choice
    order = np.random.default_rng(_SEED).permutation(len(ours.draws))
    draws = theirs.draws[order] - ours.draws
    variance = ours.variance + theirs.variance
    squares = ours.variance**2 / ours.degrees + theirs.variance**2 / theirs.degrees
    degrees = variance**2 / squares if squares > 0 else math.inf  # Satterthwaite
    error = math.sqrt(max(variance, float(np.var(draws))))
    half = t_quantile(degrees) * error
    low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]) - centre
    ratio = Interval(
        median=math.exp(centre),
        low=math.exp(centre + min(float(low), -half)),
        high=math.exp(centre + max(float(high), half)),
    )
    if error == 0:
        return ratio, 1.0 if centre == 0 else 0.0
    return ratio, 2 * float(scipy.special.stdtr(degrees, -abs(centre) / error))


class _Sample:
    """The repeats of one configuration in one run, on the logarithmic scale."""

    def __init__(self, repeats: Mapping[int, Series], noise: RunNoise | None) -> None:
        rows = [repeats[number] for number in sorted(repeats)]
        medians = np.array([row.log_median for row in rows])
        self.median = float(np.median(medians))
        self.draws = bootstrap_medians(np.stack([row.log_draws for row in rows]))
        # without repeats the noise between runs is unknown, and only the steps count
        self.variance, self.degrees = 0.0, math.inf
        if noise is not None:
            own = float(np.var(medians, ddof=1)) if len(rows) > 1 else 0.0
            spread = max(own, noise.deviation**2)
            self.variance = median_efficiency(len(rows)) ** 2 * spread / len(rows)
            self.degrees = noise.degrees
