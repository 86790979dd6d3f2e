"""The noise between runs of equal trials, estimated from all configurations of a workload together.

Repeats are blocks in which every configuration runs once in random order. So the residuals of a
two-way layout (configuration + repeat) have many more degrees of freedom than the repeats of one
configuration. Configurations may differ in noise, and few repeats say little about that of one:
each has its own variance, moved towards that of all by an empirical Bayes estimate (G. K. Smyth,
Statistical Applications in Genetics and Molecular Biology 3(1), 2004, sections 3 and 6.2). If the
variances differ no more than chance explains, all configurations have the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import scipy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from paceline.analysis.statistics.resampling import Series

CONFIDENCE = 0.95
# Standard error of the median over that of the mean, of 1 to 10 values of a normal variable, by
# integration over its order statistics. For more, the variance of the median is about
# pi / (2 n + pi - 2).
_MEDIAN_OVER_MEAN = (1, 1, 1.1602, 1.0921, 1.1976, 1.1351, 1.2137, 1.1599, 1.2227, 1.1761)
# Of the mean variance; without it a configuration whose repeats agree exactly has no logarithm.
_LEAST_VARIANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNoise:
    """Standard deviation of the logarithm of a repeat's median, with its degrees of freedom."""

    deviation: float
    degrees: float

    def half_width(self, repeats: int, confidence: float = CONFIDENCE) -> float:
        """Return half the width of the interval of a median over repeats, by Student's t."""
        width = median_efficiency(repeats) / math.sqrt(repeats)
        return t_quantile(self.degrees, confidence) * self.deviation * width


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNoises:
    """The noise of each configuration, without what all share in a repeat."""

    # as if all configurations had the same; None if there is nothing to estimate it from
    pooled: RunNoise | None
    own: Mapping[str, RunNoise] = field(default_factory=dict)

    def of(self, configuration: str) -> RunNoise | None:
        """Return the noise of a configuration; that of all if it did not help to estimate it."""
        return self.own.get(configuration, self.pooled)

    def of_ratio(self, first: str, second: str) -> RunNoise | None:
        """Return the noise of a ratio."""
        return self.of_difference(first, second, (1.0, 1.0))

    def of_difference(
        self, first: str, second: str, scales: tuple[float, float]
    ) -> RunNoise | None:
        """Return the noise of a difference of values, each of which has been scaled."""
        if (found := self.of_ratios([first, second], scales)) is None:
            return None
        deviation, degrees = found
        return RunNoise(deviation=float(deviation[0, 1]), degrees=float(degrees[0, 1]))

    def of_ratios(
        self, names: Sequence[str], scales: Sequence[float] | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Return the deviations and degrees of freedom of all ratios of configurations.

        Both have shape (names, names). The degrees follow F. E. Satterthwaite (Biometrics Bulletin
        2(6), 1946), and are at most those of all configurations together. scales: factors of the
        noise of each configuration; 1 by default.
        """
        noises = [noise for noise in map(self.of, names) if noise is not None]
        if self.pooled is None or len(noises) < len(names):
            return None
        factors = np.ones(len(noises)) if scales is None else np.asarray(scales)
        variances = np.array([noise.deviation**2 for noise in noises]) * factors**2
        squares = variances**2 / np.array([noise.degrees for noise in noises])
        sums = variances[:, None] + variances[None, :]
        divisor = squares[:, None] + squares[None, :]
        most = np.full_like(sums, self.pooled.degrees)
        degrees = np.divide(sums**2, divisor, out=most.copy(), where=divisor > 0)
        return np.sqrt(sums), np.minimum(degrees, most)


def run_noise(rates: Mapping[str, Mapping[int, Series]]) -> RunNoises:
    """Estimate the noise of each configuration's speed, without what all share in a repeat.

    rates: by configuration and repeat.
    """
    return noise_between_runs(
        {
            name: {repeat: series.log_median for repeat, series in found.items()}
            for name, found in rates.items()
        }
    )


def noise_between_runs(values: Mapping[str, Mapping[int, float]]) -> RunNoises:
    """Estimate the noise of each configuration, without what all share in a repeat.

    values: by configuration and repeat. There is no noise where no degree of freedom is left (one
    repeat, or one configuration).
    """
    cells = [
        (number, repeat, found[repeat])
        for number, found in enumerate(values.values())
        for repeat in sorted(found)
    ]
    layout = _residuals(cells) if any(len(found) > 1 for found in values.values()) else None
    if layout is None:
        return RunNoises(pooled=None)
    residuals, freedom = layout
    rows = np.array([number for number, _, _ in cells])
    squares, degrees = np.zeros(len(values)), np.zeros(len(values))
    np.add.at(squares, rows, residuals**2)
    np.add.at(degrees, rows, freedom)
    total = float(degrees.sum())
    pooled = RunNoise(deviation=math.sqrt(float(squares.sum()) / total), degrees=total)
    variances, own_degrees = _moderated(squares, degrees)
    return RunNoises(
        pooled=pooled,
        own={
            name: RunNoise(deviation=math.sqrt(variance), degrees=min(own, total))
            for name, variance, own in zip(
                values, variances.tolist(), own_degrees.tolist(), strict=True
            )
        },
    )


def total_noise(configurations: Sequence[Mapping[int, Series]]) -> RunNoise | None:
    """Estimate the run-to-run noise of one configuration, with what all share in a repeat.

    This is the noise between runs, where nothing cancels: the variance of what all configurations
    share in a repeat, plus the rest of the variance of one configuration. The degrees of freedom
    follow Satterthwaite (Biometrics Bulletin 2(6), 1946). Configurations that lack a repeat are
    left out, unless all have at least two in common: then further repeats of some are left out.
    None with fewer than two repeats.
    """
    return total_noise_of(
        [{repeat: each.log_median for repeat, each in found.items()} for found in configurations]
    )


def total_noise_of(configurations: Sequence[Mapping[int, float]]) -> RunNoise | None:
    """Do the same as `total_noise` for values by repeat."""
    repeats = sorted({repeat for found in configurations for repeat in found})
    common = [r for r in repeats if all(r in found for found in configurations)]
    repeats = common if len(common) > 1 else repeats
    complete = [found for found in configurations if all(r in found for r in repeats)]
    if len(repeats) < 2 or not complete:
        return None
    values = np.array([[found[repeat] for repeat in repeats] for found in complete])
    values -= values.mean(axis=1, keepdims=True)
    of_repeat = values.mean(axis=0)
    count, degrees = len(complete), len(repeats) - 1
    shared = float(of_repeat @ of_repeat) / degrees
    alone = float(np.sum((values - of_repeat) ** 2)) / (degrees * count)
    squares = shared**2 / degrees
    if count > 1:
        squares += alone**2 / (degrees * (count - 1))
    total = shared + alone
    return RunNoise(
        deviation=math.sqrt(total), degrees=total**2 / squares if squares > 0 else float(degrees)
    )


def t_quantile(degrees: float, confidence: float = CONFIDENCE) -> float:
    """Return the two-sided quantile of Student's t: the 97.5 % point for a confidence of 95 %."""
    return float(scipy.special.stdtrit(degrees, (1 + confidence) / 2))


def median_efficiency(repeats: int) -> float:
    """Return the standard error of a median over that of a mean of so many values."""
    if repeats <= len(_MEDIAN_OVER_MEAN):
        return _MEDIAN_OVER_MEAN[repeats - 1]
    return math.sqrt(math.pi * repeats / (2 * repeats + math.pi - 2))


def _residuals(
    cells: Sequence[tuple[int, int, float]],
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return the residuals of the least-squares fit of configuration + repeat.

    With the share of each cell in the degrees of freedom that the fit leaves. None if there are
    none.
    """
    if not cells:
        return None
    rows = {number: row for row, number in enumerate(sorted({number for number, _, _ in cells}))}
    repeats = sorted({repeat for _, repeat, _ in cells})
    design = np.zeros((len(cells), len(rows) + len(repeats)))
    for row, (number, repeat, _) in enumerate(cells):
        design[row, rows[number]] = 1
        design[row, len(rows) + repeats.index(repeat)] = 1
    fit = design @ np.linalg.pinv(design)
    freedom: NDArray[np.float64] = 1.0 - np.diagonal(fit)
    if freedom.sum() < 0.5:  # in exact arithmetic the sum is a whole number
        return None
    values = np.array([value for _, _, value in cells])
    residuals: NDArray[np.float64] = values - fit @ values
    return residuals, freedom


def _moderated(
    squares: NDArray[np.float64], degrees: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the moderated variance of each configuration and its degrees of freedom.

    squares, degrees: sums of squared residuals and their degrees of freedom, by configuration.
    """
    total = float(degrees.sum())
    mean = float(squares.sum()) / total
    same = np.full_like(squares, mean), np.full_like(squares, total)
    known = degrees > 0.01 * total / len(degrees)
    # Two configurations have equal residuals, and two repeats say nothing about single variances.
    if mean <= 0 or known.sum() < 3 or degrees[known].mean() < 1:
        return same
    variances = np.maximum(squares[known] / degrees[known], _LEAST_VARIANCE * mean)
    half = degrees[known] / 2
    logs = np.log(variances) - scipy.special.digamma(half) + np.log(half)
    excess = float(np.var(logs, ddof=1) - np.mean(scipy.special.polygamma(1, half)))
    if excess <= 0:
        return same
    prior_half = _inverse_trigamma(excess)
    prior = math.exp(float(np.mean(logs)) + float(scipy.special.digamma(prior_half))) / prior_half
    moderated = (2 * prior_half * prior + squares) / (2 * prior_half + degrees)
    return moderated, 2 * prior_half + degrees


def _inverse_trigamma(value: float) -> float:
    """Return x with trigamma(x) = value.

    The bracket follows from 1 / x < trigamma(x) < 1 / x + 1 / x^2.
    """

    def excess(x: float) -> float:
        return float(scipy.special.polygamma(1, x)) - value

    bracket = 0.5 / value, 2 / value + 2 / math.sqrt(value)
    return float(scipy.optimize.brentq(excess, *bracket))
