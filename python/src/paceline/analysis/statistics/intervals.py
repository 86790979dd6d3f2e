"""Intervals of means by Student's t: repeats, paired repeats, two runs, steps of one trial.

Values are of any unit. Speeds are passed as logarithms, so that a difference is a ratio
(`Estimate.exponential`). A repeat contributes one value: its samples over the total time of its
steady steps, or its mean seconds per step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Annotated

import numpy as np
import scipy
from numpy.typing import NDArray
from pydantic import BeforeValidator

CONFIDENCE = 0.95
POWER = 0.8  # probability with which a difference is found that is called detectable
# Batches of the steps of one trial. Few long batches are nearly independent of each other.
_BATCHES, _LEAST_FOR_MORE, _MORE_BATCHES = 4, 30, 5
LEAST_STEPS = 20
WIDEST = 2.0  # ratio of the bounds of an interval that tells something
# The batch must be so many times longer than the time over which steps resemble each other.
_BATCH_OVER_CORRELATION = 3.0


# JSON has no infinity: paceline.measure.records.files writes it as null.
Unbounded = Annotated[float, BeforeValidator(lambda bound: math.inf if bound is None else bound)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and the bounds of its confidence interval, in the unit of the measurement.

    median: the estimate; the name is that of the JSON contract. For figures over repeats it is the
    geometric mean, which is the median of a log-normal variable.
    """

    median: float
    low: float
    high: Unbounded

    def scaled(self, factor: float) -> Interval:
        return Interval(median=self.median * factor, low=self.low * factor, high=self.high * factor)

    def inverse(self) -> Interval:
        """Return the interval of one over the value, such as a time from a rate."""
        low = 0.0 if math.isinf(self.high) else 1 / self.high
        high = math.inf if self.low == 0 else 1 / self.low
        return Interval(median=1 / self.median, low=low, high=high)

    @property
    def is_known(self) -> bool:
        """False if the interval spans more than a factor of WIDEST, which tells nothing."""
        return self.high <= WIDEST * self.low


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean or a difference of means and the bounds of its interval, 95 % unless stated."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean or difference with its confidence interval; infinite bounds if there is no noise.

    is_reliable: False if the interval is known to be too narrow.
    """

    value: float
    low: float
    high: float
    error: float = math.inf  # standard error
    degrees: float = 0.0  # of freedom of the error
    is_reliable: bool = True

    def exponential(self) -> Interval:
        """Return the ratio or speed of a logarithm."""
        with np.errstate(over="ignore"):
            median, low, high = np.exp([self.value, self.low, self.high]).tolist()
        return Interval(median=median, low=low, high=high)

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high

    def shifted(self, by: float) -> Estimate:
        """Return the estimate of the value plus a constant."""
        return replace(self, value=self.value + by, low=self.low + by, high=self.high + by)

    def negated(self) -> Estimate:
        """Return the estimate of minus the value, such as of the inverse ratio of a logarithm."""
        return replace(self, value=-self.value, low=-self.high, high=-self.low)

    def as_mean(self) -> Mean:
        return Mean(mean=self.value, low=self.low, high=self.high)

    @property
    def p_value(self) -> float:
        """Two-sided p-value of the hypothesis that the mean or logarithm is zero."""
        if self.degrees <= 0:
            return 1.0
        if self.error == 0:
            return 1.0 if self.value == 0 else 0.0
        return 2 * float(scipy.special.stdtr(self.degrees, -abs(self.value) / self.error))


def estimate(
    value: float, error: float, degrees: float, confidence: float = CONFIDENCE
) -> Estimate:
    """Return the interval by Student's t for a value with a standard error."""
    if degrees <= 0:
        return Estimate(value=value, low=-math.inf, high=math.inf)
    half = float(scipy.special.stdtrit(degrees, (1 + confidence) / 2)) * error
    return Estimate(value=value, low=value - half, high=value + half, error=error, degrees=degrees)


def detectable_difference(error: float, critical: float) -> float:
    """Return the difference that a test finds with the probability POWER.

    error: standard error of the difference. critical: the difference that is significant.
    """
    return critical + float(scipy.special.ndtri(POWER)) * error


def mean_interval(values: NDArray[np.float64], confidence: float = CONFIDENCE) -> Estimate | None:
    """Return the mean of independent values, such as repeats; None without values.

    values: NaN where a repeat is missing. With a single value both bounds are infinite.
    """
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    deviation = float(np.std(known, ddof=1)) if len(known) > 1 else 0.0
    error = deviation / math.sqrt(len(known))
    return estimate(float(np.mean(known)), error, len(known) - 1, confidence)


def mean_over_steps(values: NDArray[np.float64], confidence: float = CONFIDENCE) -> Estimate | None:
    """Return the mean of consecutive steps of one trial; None without steps.

    Steps resemble their neighbours, as in an autoregressive process of order one. So they tell as
    much as fewer independent ones.
    """
    found = mean_interval(values, confidence)
    if found is None or found.degrees <= 0:
        return found
    rho = _neighbour_correlation(values)
    growth = (1 + rho) / (1 - rho)  # of the variance of the mean
    degrees = max(len(values) / growth - 1, 1.0)
    return estimate(found.value, found.error * math.sqrt(growth), degrees, confidence)


def spread_of_pairs(values: NDArray[np.float64]) -> float:
    """Return the difference that two new values exceed in 5 % of cases. values: at least two."""
    quantile = float(scipy.special.stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    return quantile * float(np.std(values, ddof=1)) * math.sqrt(2)


def welch_difference(before: Estimate, after: Estimate) -> Estimate:
    """Return after - before of two runs, whose repeats have nothing in common.

    If the error of one of them is unknown, both bounds are infinite.
    """
    value = after.value - before.value
    if before.degrees <= 0 or after.degrees <= 0:
        return estimate(value, math.inf, 0)
    variances = np.array([before.error**2, after.error**2])
    degrees = satterthwaite(variances, np.array([before.degrees, after.degrees]))
    return estimate(value, math.sqrt(float(variances.sum())), float(degrees))


def single_trial_log_mean(values: NDArray[np.float64]) -> Estimate | None:
    """Return the logarithm of the mean step of one trial, by batch means; None below LEAST_STEPS.

    The interval covers the noise of the steps of this trial. It says nothing of other repeats.
    Steps resemble their neighbours, so independent batches of consecutive steps are the sample. Not
    reliable: the batches are too short for the autocorrelation of the steps.
    values: positive, in the order in which they were measured.
    """
    if len(values) < LEAST_STEPS:
        return None
    batches = _BATCHES if len(values) < _LEAST_FOR_MORE else _MORE_BATCHES
    means = np.log([float(part.mean()) for part in np.array_split(values, batches)])
    error = float(np.std(means, ddof=1)) / math.sqrt(batches)
    found = estimate(math.log(float(np.mean(values))), error, batches - 1)
    length = len(values) / batches
    is_reliable = length >= _BATCH_OVER_CORRELATION * _correlation_steps(values)
    return replace(found, is_reliable=is_reliable)


def holm(p_values: Mapping[str, float]) -> set[str]:
    """Return the hypotheses of a family that are rejected at 5 % (S. Holm, 1979); NaN: untested."""
    tested = sorted((p, name) for name, p in p_values.items() if not math.isnan(p))
    rejected: set[str] = set()
    for number, (p, name) in enumerate(tested):
        if p > (1 - CONFIDENCE) / (len(tested) - number):
            break
        rejected.add(name)
    return rejected


def satterthwaite(
    variances: NDArray[np.float64], degrees: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the degrees of freedom of a sum of estimated variances, along the first axis."""
    total = variances.sum(axis=0) ** 2
    parts = (variances**2 / degrees).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found: NDArray[np.float64] = np.where(parts > 0, total / parts, degrees.min(axis=0))
    return found


def _correlation_steps(values: NDArray[np.float64]) -> float:
    """Return over how many steps an autoregressive process of order one resembles itself."""
    rho = _neighbour_correlation(values)
    return 2 * rho / (1 - rho**2)


def _neighbour_correlation(values: NDArray[np.float64]) -> float:
    """Return the correlation of neighbouring steps, between 0 and 0.99."""
    centred = values - values.mean()
    square = float(centred @ centred)
    if square == 0:
        return 0.0
    return min(max(float(centred[1:] @ centred[:-1]) / square, 0.0), 0.99)


# --- levels for testing after every repeat (`repeats = "auto"`) ----------------------------------
#
# Testing after every repeat at 5 % would find a difference between equal configurations far too
# often. Therefore the 5 % are spent over the looks: after k of at most K repeats, 5 % x (k / K)^2
# may have been spent (alpha spending: K. K. G. Lan and D. L. DeMets, Biometrika 70(3), 1983; power
# family: K. Kim and D. L. DeMets, Biometrika 74(1), 1987). The level of each look follows from the
# probability of reaching it without a significant difference, by the recursion of P. Armitage, C.
# K. McPherson and B. C. Rowe (Journal of the Royal Statistical Society A 132(2), 1969). It is then
# the family-wise level of `find_fastest`. Using the levels of normal statistics for other tests is
# an approximation (S. J. Pocock, Biometrika 64(2), 1977).
#
# A run is decided as soon as `find_fastest(layout, level=levels(most)[repeats]).undecided` is
# empty.

FIRST_LOOK = 2  # repeats: with one, the noise between runs is unknown
_POWER = 2.0
_POINTS = 100  # of Gauss-Legendre, at which densities are integrated
_REACH = 8.0  # standard deviations that the grid covers at most


@cache
def levels(most_repeats: int) -> Mapping[int, float]:
    """Return the two-sided level of the test after each number of repeats, from FIRST_LOOK on.

    The probability that any of these looks at a normal statistic of equal configurations is
    significant is 5 %.
    """
    found: dict[int, float] = {}
    spent, before = 0.0, 0
    grid, density = np.zeros(1), np.ones(1)  # of the sum of all differences, where no look decided
    weight = np.ones(1)
    nodes, weights = scipy.special.roots_legendre(_POINTS)
    for repeats in range(FIRST_LOOK, most_repeats + 1):
        allowed = (1 - CONFIDENCE) * (repeats / most_repeats) ** _POWER
        step = np.sqrt(repeats - before)
        mass = density * weight
        bound = _bound(grid, mass, float(step), allowed - spent, repeats)
        found[repeats] = float(2 * scipy.special.ndtr(-bound / np.sqrt(repeats)))
        distance = (bound * nodes[:, None] - grid[None, :]) / step
        density = np.exp(-0.5 * distance**2) @ mass / (step * np.sqrt(2 * np.pi))
        grid, weight = bound * nodes, bound * weights
        before, spent = repeats, allowed
    return MappingProxyType(found)


def _bound(
    grid: NDArray[np.float64],
    mass: NDArray[np.float64],
    step: float,
    probability: float,
    repeats: int,
) -> float:
    """Return the bound that the sum exceeds at this look with the given probability."""

    def excess(bound: float) -> float:
        sides = [(grid - bound) / step, (-grid - bound) / step]
        return float(scipy.special.ndtr(sides).sum(axis=0) @ mass) - probability

    return float(scipy.optimize.brentq(excess, 0.0, _REACH * np.sqrt(repeats)))


# --- rank correlation with a permutation test ----------------------------------------------------

_SEED = 20220131
_PERMUTATIONS = 10_000
_MOST_EXACT = 7  # values, of which all permutations are tried
LEAST_VALUES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCorrelation:
    """Spearman's rank correlation; ties have the mean of their ranks."""

    correlation: float
    p_value: float  # two-sided, of the hypothesis that the order of one says nothing of the other


def rank_correlation(
    first: NDArray[np.float64], second: NDArray[np.float64]
) -> RankCorrelation | None:
    """Return the rank correlation of pairs of values; None below three pairs or without an order.

    The p-value is exact for up to seven pairs. For more it comes from seeded permutations.
    """
    if len(first) < LEAST_VALUES:
        return None
    ranks = [_standardised(values) for values in (first, second)]
    if ranks[0] is None or ranks[1] is None:
        return None
    correlation = float(ranks[0] @ ranks[1])
    permuted = _permutations(len(first))
    others = ranks[1][permuted] @ ranks[0]
    extreme = int((np.abs(others) >= abs(correlation) - 1e-12).sum())
    count = len(permuted)
    is_exact = count == math.factorial(len(first))
    p_value = extreme / count if is_exact else (extreme + 1) / (count + 1)
    return RankCorrelation(correlation=correlation, p_value=p_value)


def _standardised(values: NDArray[np.float64]) -> NDArray[np.float64] | None:
    ranks = scipy.stats.rankdata(values)
    centred = ranks - ranks.mean()
    norm = float(np.linalg.norm(centred))
    if norm == 0:
        return None
    scaled: NDArray[np.float64] = centred / norm
    return scaled


def _permutations(size: int) -> NDArray[np.int64]:
    if size <= _MOST_EXACT:
        return np.array(list(itertools.permutations(range(size))))
    generator = np.random.default_rng(_SEED)
    return generator.permuted(np.tile(np.arange(size), (_PERMUTATIONS, 1)), axis=1)
