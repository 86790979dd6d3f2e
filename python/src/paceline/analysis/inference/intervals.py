"""Intervals of means by Student's t: repeats, paired repeats, two runs, steps of one trial.

Values are of any unit. Speeds are passed as logarithms, so that a difference is a ratio
(`Estimate.exponential`). A repeat contributes one value: its samples over the total time of its
steady steps, or its mean seconds per step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONFIDENCE = 0.95
# Batches of the steps of one trial. Few long batches are nearly independent of each other.
_BATCHES, _LEAST_FOR_MORE, _MORE_BATCHES = 4, 30, 5
LEAST_STEPS = 20
# The batch must be so many times longer than the time over which steps resemble each other.
_BATCH_OVER_CORRELATION = 3.0


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

    def exponential(self) -> Estimate:
        """Return the ratio or speed of a logarithm; the error remains that of the logarithm."""
        with np.errstate(over="ignore"):
            bounds = np.exp([self.value, self.low, self.high]).tolist()
        return Estimate(
            value=bounds[0],
            low=bounds[1],
            high=bounds[2],
            error=self.error,
            degrees=self.degrees,
            is_reliable=self.is_reliable,
        )

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def p_value(self) -> float:
        """Two-sided p-value of the hypothesis that the mean or logarithm is zero.

        Only for estimates that are not exponential.
        """
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


def paired_difference(
    ours: NDArray[np.float64], theirs: NDArray[np.float64], confidence: float = CONFIDENCE
) -> Estimate | None:
    """Return the mean of ours - theirs over common repeats; None without any.

    ours, theirs: by repeat, NaN where it is missing.
    """
    return mean_interval(ours - theirs, confidence)


def welch_difference(
    before: NDArray[np.float64], after: NDArray[np.float64], confidence: float = CONFIDENCE
) -> Estimate | None:
    """Return mean(after) - mean(before) of two runs, whose repeats have nothing in common.

    With a single repeat on one side both bounds are infinite. None if one side has no repeats.
    """
    first, second = mean_interval(before), mean_interval(after)
    if first is None or second is None:
        return None
    value = second.value - first.value
    if first.degrees <= 0 or second.degrees <= 0:
        return estimate(value, math.inf, 0)
    variances = np.array([first.error**2, second.error**2])
    degrees = satterthwaite(variances, np.array([first.degrees, second.degrees]))
    return estimate(value, math.sqrt(float(variances.sum())), float(degrees), confidence)


def single_trial_log_mean(
    values: NDArray[np.float64], confidence: float = CONFIDENCE
) -> Estimate | None:
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
    found = estimate(math.log(float(np.mean(values))), error, batches - 1, confidence)
    length = len(values) / batches
    is_reliable = length >= _BATCH_OVER_CORRELATION * _correlation_steps(values)
    return Estimate(
        value=found.value,
        low=found.low,
        high=found.high,
        error=found.error,
        degrees=found.degrees,
        is_reliable=is_reliable,
    )


def holm(p_values: NDArray[np.float64], level: float = 1 - CONFIDENCE) -> NDArray[np.bool_]:
    """Return which hypotheses of a family are rejected at `level` (S. Holm, 1979); NaN: none."""
    tested = np.flatnonzero(~np.isnan(p_values))
    order = tested[np.argsort(p_values[tested], kind="stable")]
    kept = np.flatnonzero(p_values[order] > level / np.arange(len(order), 0, -1))
    rejected = np.zeros(len(p_values), dtype=bool)
    rejected[order[: kept[0]] if len(kept) else order] = True
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
    centred = values - values.mean()
    square = float(centred @ centred)
    if square == 0:
        return 0.0
    first = float(centred[1:] @ centred[:-1]) / square
    rho = min(max(first, 0.0), 0.99)
    return 2 * rho / (1 - rho**2)
