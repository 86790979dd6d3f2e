"""Intervals, families of tests, levels of repeated looks, and rank correlations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import scipy
from numpy.typing import NDArray
from pydantic import AliasChoices, BeforeValidator, Field

CONFIDENCE = 0.95
WIDEST = 2.0  # ratio of the bounds of an interval that tells something

# JSON has no infinity: paceline.measure.records.files writes it as null.
Unbounded = Annotated[float, BeforeValidator(lambda bound: math.inf if bound is None else bound)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and the bounds of its interval, in the unit of the measurement.

    Documents before 0.4.0 call the estimate `median`.
    """

    estimate: Annotated[float, Field(validation_alias=AliasChoices("estimate", "median"))]
    low: float
    high: Unbounded

    def scaled(self, factor: float) -> Interval:
        return Interval(
            estimate=self.estimate * factor, low=self.low * factor, high=self.high * factor
        )

    def inverse(self) -> Interval:
        """Return the interval of one over the value, such as a time from a rate."""
        low = 0.0 if math.isinf(self.high) else 1 / self.high
        high = math.inf if self.low == 0 else 1 / self.low
        return Interval(estimate=1 / self.estimate, low=low, high=high)

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
    """A difference, or a logarithm of a speed or ratio, with the bounds of its interval.

    The bounds are infinite if the noise is unknown.
    """

    value: float
    low: float = -math.inf
    high: float = math.inf

    def exponential(self) -> Interval:
        """Return the ratio or speed of a logarithm."""
        with np.errstate(over="ignore"):
            estimate, low, high = np.exp([self.value, self.low, self.high]).tolist()
        return Interval(estimate=estimate, low=low, high=high)

    def scaled(self, factor: float) -> Estimate:
        bounds = sorted((self.low * factor, self.high * factor))
        return Estimate(value=self.value * factor, low=bounds[0], high=bounds[1])

    def as_mean(self) -> Mean:
        return Mean(mean=self.value, low=self.low, high=self.high)


def mean_over_steps(values: NDArray[np.float64], confidence: float = CONFIDENCE) -> Estimate | None:
    """Return the mean of consecutive steps of one trial by Student's t; None without steps.

    Steps resemble their neighbours, as in an autoregressive process of order one. So they tell as
    much as fewer independent ones.
    """
    if len(values) < 2:
        return Estimate(value=float(values[0])) if len(values) else None
    centred = values - values.mean()
    square = float(centred @ centred)
    rho = float(centred[1:] @ centred[:-1]) / square if square else 0.0
    rho = min(max(rho, 0.0), 0.99)
    independent = len(values) * (1 - rho) / (1 + rho)
    quantile = scipy.special.stdtrit(max(independent - 1, 1.0), (1 + confidence) / 2)
    half = float(quantile * np.std(values, ddof=1) / math.sqrt(independent))
    value = float(values.mean())
    return Estimate(value=value, low=value - half, high=value + half)


def spread_of_pairs(values: NDArray[np.float64]) -> float:
    """Return the difference that two new values exceed in 5 % of cases. values: at least two."""
    quantile = float(scipy.special.stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    return quantile * float(np.std(values, ddof=1)) * math.sqrt(2)


def holm(p_values: Mapping[str, float], level: float = 1 - CONFIDENCE) -> set[str]:
    """Return the hypotheses of a family that are rejected (S. Holm, 1979); NaN: untested."""
    tested = sorted((p, name) for name, p in p_values.items() if not math.isnan(p))
    rejected: set[str] = set()
    for number, (p, name) in enumerate(tested):
        if p > level / (len(tested) - number):
            break
        rejected.add(name)
    return rejected


FIRST_LOOK = 2  # repeats: with one, the noise between runs is unknown


def levels(most_repeats: int) -> Mapping[int, float]:
    """Return the family-wise level of the test after each number of repeats of `repeats = "auto"`.

    Testing after every repeat at 5 % would find a difference between equal configurations far too
    often. So the looks share the 5 %: after k of at most K repeats, 5 % x (k / K)^2 may have been
    spent (K. Kim, D. L. DeMets, Biometrika 74(1), 1987). Levels that add up to 5 % are right for
    any test.
    """
    looks = range(FIRST_LOOK, most_repeats + 1)
    spent = {k: (1 - CONFIDENCE) * (k / most_repeats) ** 2 for k in looks}
    return {k: spent[k] - spent.get(k - 1, 0.0) for k in looks}


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
