"""Pairwise comparison of the configurations of one workload, corrected for the number of pairs.

The test is Student's t on the logarithm of the ratio within repeats, with the run-to-run noise
(paceline.analysis.statistics.noise). The standard error of a single repeat is at least that of the
bootstrap over steps. A pair is a tie if its difference is not significant at 5 % after Holm's
correction (S. Holm: A Simple Sequentially Rejective Multiple Test Procedure, Scandinavian Journal
of Statistics 6(2), 1979).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import scipy

from paceline.analysis.statistics.noise import CONFIDENCE, median_efficiency, t_quantile
from paceline.analysis.statistics.series import Interval

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from paceline.analysis.statistics.noise import RunNoises
    from paceline.analysis.statistics.resampling import Series


class Pairwise:
    """All pairs of configurations: the ratio of their speeds, and whether it is a tie."""

    def __init__(
        self,
        names: Sequence[str],
        rates: Mapping[str, Mapping[int, Series]],
        noises: RunNoises,
        level: float = 1 - CONFIDENCE,
    ) -> None:
        """rates: reduced samples per second by configuration and repeat.

        level: of the whole family of tests.
        """
        self._level = level
        self._names = list(names)
        self._index = {name: number for number, name in enumerate(self._names)}
        repeats = sorted({repeat for name in self._names for repeat in rates[name]})
        medians = np.full((len(self._names), len(repeats)), np.nan)
        variances = np.full_like(medians, np.nan)
        for number, name in enumerate(self._names):
            for column, repeat in enumerate(repeats):
                if repeat in rates[name]:
                    found = rates[name][repeat]
                    medians[number, column] = found.log_median
                    variances[number, column] = float(np.var(found.log_draws))
        noise = noises.of_ratios(self._names)
        self._centre, self._error, self._degrees = _compare(medians, variances, noise)
        self._tied = self._holm()

    def ties(self) -> Iterator[tuple[str, str, Interval]]:
        """Yield the tied pairs in the order of the names, each with its ratio."""
        for first, second in np.argwhere(np.triu(self._tied, 1)).tolist():
            yield self._names[first], self._names[second], self._ratio(first, second)

    def is_tie(self, first: str, second: str) -> bool:
        """Tell whether two configurations do not differ significantly.

        True also if they have no repeat in common.
        """
        return bool(self._tied[self._index[first], self._index[second]])

    def is_within(self, first: str, second: str, margin: float) -> bool:
        """Tell whether two configurations are shown to differ by less than the margin.

        margin: of their ratio, 0.05 for 5 %. The whole interval of the ratio lies within it
        (confidence 1 - level).
        """
        ratio = self._ratio(self._index[first], self._index[second], 1 - self._level)
        return ratio.high < 1 + margin and ratio.low > 1 / (1 + margin)

    def _ratio(self, first: int, second: int, confidence: float = CONFIDENCE) -> Interval:
        centre = float(self._centre[first, second])
        degrees = float(self._degrees[first, second])
        half = float(self._error[first, second]) * t_quantile(degrees, confidence)
        return Interval(
            median=math.exp(centre), low=math.exp(centre - half), high=math.exp(centre + half)
        )

    def _holm(self) -> NDArray[np.bool_]:
        """Return the matrix of ties; pairs that cannot be compared are left out of the family."""
        size = len(self._names)
        tied = np.ones((size, size), dtype=bool)
        rows, columns = np.triu_indices(size, 1)
        p_values = _p_values(
            self._centre[rows, columns], self._error[rows, columns], self._degrees[rows, columns]
        )
        rejected = holm(p_values, self._level)
        tied[rows[rejected], columns[rejected]] = False
        tied[columns[rejected], rows[rejected]] = False
        return tied


def holm(p_values: NDArray[np.float64], level: float) -> NDArray[np.bool_]:
    """Return which null hypotheses of a family are rejected at `level`; NaN is not tested."""
    tested = np.flatnonzero(~np.isnan(p_values))
    order = tested[np.argsort(p_values[tested])]
    limits = level / np.arange(len(order), 0, -1)
    kept = np.flatnonzero(p_values[order] > limits)
    rejected = np.zeros(len(p_values), dtype=bool)
    rejected[order[: kept[0]] if len(kept) else order] = True
    return rejected


def _compare(
    medians: NDArray[np.float64],
    variances: NDArray[np.float64],
    noise: tuple[NDArray[np.float64], NDArray[np.float64]] | None,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the log ratio of each pair, its standard error and its degrees of freedom.

    medians, variances: of the logarithm, shape (configurations, repeats), NaN where a repeat is
    missing. noise: between runs, of each pair, with its degrees of freedom; None if unknown. The
    results have shape (configurations, configurations), NaN without common repeats.
    """
    differences = medians[:, None, :] - medians[None, :, :]
    known = ~np.isnan(differences)
    common = known.sum(axis=2)
    count = np.maximum(common, 1)
    efficiency = np.vectorize(median_efficiency, otypes=[float])(count)
    filled = np.where(known, differences, 0.0)
    mean = filled.sum(axis=2) / count
    squares = np.where(known, (differences - mean[:, :, None]) ** 2, 0.0).sum(axis=2)
    own = np.sqrt(squares / np.maximum(count - 1, 1))
    within = np.where(known, variances[:, None, :] + variances[None, :, :], 0.0).sum(axis=2)
    error = efficiency * np.sqrt(within) / count
    if noise is None:
        has_noise = common > 1
        between, degrees = own, np.where(has_noise, np.maximum(count - 1.0, 1.0), np.inf)
    else:
        has_noise = common > 0
        between, degrees = noise[0], np.where(has_noise, noise[1], np.inf)
    of_runs = np.where(has_noise, efficiency * between / np.sqrt(count), 0.0)
    # The noise of several runs includes that of their steps.
    error = np.where((common > 1) & (noise is not None), of_runs, np.maximum(error, of_runs))
    centre = np.where(common > 0, _median(differences, known), np.nan)
    return centre, error, degrees


def _median(values: NDArray[np.float64], known: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the median along the last axis of the known values; 0 without any."""
    if not values.size:
        return np.zeros(values.shape[:2])
    if known.all():
        complete: NDArray[np.float64] = np.median(values, axis=2)
        return complete
    some = known.any(axis=2)
    found: NDArray[np.float64] = np.nanmedian(np.where(some[:, :, None], values, 0.0), axis=2)
    return found


def _p_values(
    centre: NDArray[np.float64], error: NDArray[np.float64], degrees: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the two-sided p-values; without any noise every difference is significant."""
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = np.abs(centre) / error
    statistic = np.where((error == 0) & (centre == 0), 0.0, statistic)
    p_values: NDArray[np.float64] = 2 * scipy.special.stdtr(degrees, -statistic)
    return p_values
