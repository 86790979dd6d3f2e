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
        """False if the interval has no bound at all, because the noise is unknown."""
        return self.low > 0 or math.isfinite(self.high)


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

    Steps resemble their neighbours, as in an autoregressive process of order one with the
    correlation rho of neighbours. For their mean, they are worth n (1 - rho) / (1 + rho)
    independent ones; for their variance, n (1 - rho^2) / (1 + rho^2) (G. V. Bayley,
    J. M. Hammersley, Supplement to the Journal of the Royal Statistical Society 8(2), 1946).
    The second number, not the first, says how well the noise is known. In few steps rho is high by
    chance, and with the first one, six steps between 289 and 312 ms could have a mean below zero.
    """
    if len(values) < 2:
        return Estimate(value=float(values[0])) if len(values) else None
    centred = values - values.mean()
    square = float(centred @ centred)
    rho = float(centred[1:] @ centred[:-1]) / square if square else 0.0
    rho = min(max(rho, 0.0), 0.99)
    for_mean = len(values) * (1 - rho) / (1 + rho)
    for_variance = len(values) * (1 - rho**2) / (1 + rho**2)
    # Of resembling steps, the mean takes away more of the squares than one degree of freedom.
    variance = square / max(len(values) * (1 - 1 / for_mean), 1.0)
    quantile = scipy.special.stdtrit(max(for_variance - 1, 1.0), (1 + confidence) / 2)
    half = float(quantile * math.sqrt(variance / for_mean))
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


FIRST_LOOK = 3  # repeats: two hardly tell noise from a disturbance


def levels(most_repeats: int) -> Mapping[int, float]:
    """Return the family-wise level of the test after each number of repeats of `repeats = "auto"`.

    Testing after every repeat at 5 % would find a difference between equal configurations far too
    often. So the looks share the 5 %: after k of at most K repeats, 5 % x (k / K)^2 may have been
    spent (K. Kim, D. L. DeMets, Biometrika 74(1), 1987). Levels that add up to 5 % are right for
    any test.
    """
    looks = range(min(FIRST_LOOK, most_repeats), most_repeats + 1)
    spent = {k: (1 - CONFIDENCE) * (k / most_repeats) ** 2 for k in looks}
    return {k: spent[k] - spent.get(k - 1, 0.0) for k in looks}


# --- rank correlation with a permutation test ----------------------------------------------------

_SEED = 20220131
_PERMUTATIONS = 10_000
_MOST_EXACT = 7  # units, of which all permutations are tried
LEAST_UNITS = 3
_POWER = 0.8
_RANK_VARIANCE = 1.06  # of Fisher's transform of a rank correlation (E. C. Fieller, 1957)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCorrelation:
    """Spearman's rank correlation; ties have the mean of their ranks."""

    correlation: float
    p_value: float  # two-sided, of the hypothesis that the order of one says nothing of the other


def rank_correlation(
    first: NDArray[np.float64],
    second: NDArray[np.float64],
    given: NDArray[np.float64] | None = None,
) -> RankCorrelation | None:
    """Return the rank correlation of two values of the same units, measured in several blocks.

    first, second: shape (blocks, units), or (units,). given: shape (units,); a value on which both
    may depend, whose ranks are taken out of both (partial correlation). None for too few units, or
    if nothing is left that differs.

    Ranks are those within a block, so differences between blocks do not count. A permutation moves
    a unit in all blocks at once: what one unit does in several blocks is not independent. It moves
    residuals (D. Freedman, D. Lane, Journal of Business & Economic Statistics 1(4), 1983). The
    p-value is exact for up to seven units. For more it comes from seeded permutations.
    """
    ours, theirs = (scipy.stats.rankdata(np.atleast_2d(each), axis=1) for each in (first, second))
    units = ours.shape[1]
    if units < LEAST_UNITS + (given is not None):
        return None
    residual = _residual(units, given)
    ours, theirs = ours @ residual, theirs @ residual
    scale = float(np.linalg.norm(ours))
    if min(scale, float(np.linalg.norm(theirs))) < 1e-9:
        return None
    permuted = _permutations(units)
    others = theirs[:, permuted] @ residual
    norms = np.linalg.norm(others, axis=(0, 2))
    products = np.einsum("bu,bpu->p", ours, others)
    found = np.divide(products, scale * norms, out=np.zeros_like(norms), where=norms > 1e-9)
    correlation = float((ours * theirs).sum() / (scale * np.linalg.norm(theirs)))
    extreme = int((np.abs(found) >= abs(correlation) - 1e-12).sum())
    count = len(permuted)
    is_exact = count == math.factorial(units)
    p_value = extreme / count if is_exact else (extreme + 1) / (count + 1)
    return RankCorrelation(correlation=correlation, p_value=p_value)


def least_p_value(units: int) -> float:
    """Return the smallest two-sided p-value of a permutation test of so many units."""
    count = math.factorial(min(units, _MOST_EXACT))
    return 2 / count if units <= _MOST_EXACT else 1 / (_PERMUTATIONS + 1)


def least_units(tests: int) -> int:
    """Return the units from which on one of so many tests can be significant with Holm's method."""
    needed = range(LEAST_UNITS, _MOST_EXACT + 2)
    return next(n for n in needed if least_p_value(n) <= (1 - CONFIDENCE) / tests)


def units_to_find(correlation: float, tests: int, given: int = 0) -> int | None:
    """Return the units with which a correlation is found with a probability of 80 %.

    tests: with Holm's method. given: values that are taken out. None if there is no correlation.
    """
    distance = abs(math.atanh(min(max(correlation, -0.999), 0.999)))
    if distance < 1e-3:
        return None
    quantiles = scipy.special.ndtri([1 - (1 - CONFIDENCE) / tests / 2, _POWER]).sum()
    found = _RANK_VARIANCE * float(quantiles / distance) ** 2
    return max(math.ceil(found) + 3 + given, least_units(tests))


def _residual(units: int, given: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """Return the matrix that takes the mean, and the ranks of a value, out of ranks."""
    found: NDArray[np.float64] = np.eye(units) - 1 / units
    if given is None:
        return found
    ranks = scipy.stats.rankdata(given) @ found
    norm = float(np.linalg.norm(ranks))
    return found if norm == 0 else found - np.outer(ranks, ranks) / norm**2


def _permutations(size: int) -> NDArray[np.int64]:
    if size <= _MOST_EXACT:
        return np.array(list(itertools.permutations(range(size))))
    generator = np.random.default_rng(_SEED)
    return generator.permuted(np.tile(np.arange(size), (_PERMUTATIONS, 1)), axis=1)
