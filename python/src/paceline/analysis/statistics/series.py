"""Medians and ratios with 95 % confidence intervals from repeated runs of autocorrelated steps.

The estimate is the median over repeats of each repeat's median over steps. Its interval comes from
a hierarchical bootstrap on the logarithmic scale: repeats are drawn with replacement, then moving
blocks of steps within each repeat (Davison and Hinkley, Bootstrap Methods and their Application,
1997, sections 3.8 and 8.2.3; block length n^(1/3): Hall, Horowitz, Jing, Biometrika 82(3), 1995).

A bootstrap over two or three repeats is always too narrow (Hesterberg, The American Statistician
69(4), 2015, section 3.2). Therefore with several repeats the interval is that of Student's t for
the run-to-run noise, which paceline.analysis.statistics.noise estimates from all configurations
together. It includes the noise of the steps. The bootstrap remains for single repeats, and where
the noise is unknown. The wider one of the two would find a tenth to a third of the false alarms
that it should.

If every configuration has a single repeat, the run-to-run noise is unknown, and intervals cover the
steps only. Tables and reports say so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import BeforeValidator

from paceline.analysis.statistics.noise import CONFIDENCE, RunNoise
from paceline.analysis.statistics.resampling import (
    Series,
    bootstrap_medians,
    log_median_draws,
    mean_draws,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

# JSON has no infinity: paceline.records.files writes it as null.
Unbounded = Annotated[float, BeforeValidator(lambda bound: math.inf if bound is None else bound)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A median and the bounds of its 95 % confidence interval."""

    median: float
    low: float
    high: Unbounded

    def scaled(self, factor: float) -> Interval:
        return Interval(median=self.median * factor, low=self.low * factor, high=self.high * factor)

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean and the bounds of its interval, 95 % unless stated otherwise."""

    mean: float
    low: float
    high: float


def series(values: NDArray[np.float64], key: str) -> Series | None:
    """Reduce one repeat's steps; None if there are none.

    values: positive, in the order in which they were measured, shape (steps,).
    key: names the repeat; equal keys and values give equal draws.
    """
    if not len(values):
        return None
    return Series(
        log_median=float(np.log(np.median(values))), log_draws=log_median_draws(values, key)
    )


def total_series(values: NDArray[np.float64], key: str) -> Series:
    """Reduce the steps of one repeat to the logarithm of their sum, and of resamples of it.

    values: positive, in the order in which they were measured, shape (steps,), at least one.
    """
    return Series(
        log_median=float(np.log(np.sum(values))),
        log_draws=np.log(len(values) * mean_draws(values[None, :], key)[:, 0]),
    )


def median_interval(
    repeats: Mapping[int, Series], noise: RunNoise | None = None
) -> Interval | None:
    """Return the median over repeats with its interval; None without repeats."""
    if not repeats:
        return None
    rows = [repeats[r] for r in sorted(repeats)]
    medians = np.array([s.log_median for s in rows])
    draws = np.stack([s.log_draws for s in rows])
    return _interval(medians, draws, noise)


def ratio_interval(
    numerator: Mapping[int, Series],
    denominator: Mapping[int, Series],
    noise: RunNoise | None = None,
) -> Interval | None:
    """Return the median over repeats of the ratio within each repeat, with its interval.

    Only common repeats count, so that slow drifts of the machine cancel. None if there are none.

    noise: of the ratio (RunNoises.of_ratio).
    """
    common = sorted(set(numerator) & set(denominator))
    if not common:
        return None
    medians = np.array([numerator[r].log_median - denominator[r].log_median for r in common])
    draws = np.stack([numerator[r].log_draws - denominator[r].log_draws for r in common])
    return _interval(medians, draws, noise)


def mean_interval(
    values: NDArray[np.float64], key: str, confidence: float = CONFIDENCE
) -> Mean | None:
    """Return the mean over the steps of one run with its interval; None without steps.

    values: of any sign, in the order in which they were measured, shape (steps,).
    key: names the values; equal keys and values give equal draws.
    """
    if not len(values):
        return None
    draws = mean_draws(values[None, :], key)[:, 0]
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Mean(mean=float(np.mean(values)), low=float(low), high=float(high))


def _interval(
    medians: NDArray[np.float64], draws: NDArray[np.float64], noise: RunNoise | None
) -> Interval:
    """medians: shape (repeats,); draws: shape (repeats, DRAWS); both logarithms."""
    centre, repeats = float(np.median(medians)), len(medians)
    if noise is not None and repeats > 1:
        half = noise.half_width(repeats)
        return _around(centre, -half, half)
    if repeats > 1:
        noise = RunNoise(deviation=float(np.std(medians, ddof=1)), degrees=repeats - 1)
    least = 0.0 if noise is None else noise.half_width(repeats)
    deviations = bootstrap_medians(draws) - centre
    low, high = np.quantile(deviations, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return _around(centre, min(float(low), -least), max(float(high), least))


def _around(centre: float, low: float, high: float) -> Interval:
    """Return the interval of a value from its logarithm and the distances of the bounds."""
    return Interval(
        median=math.exp(centre), low=math.exp(centre + low), high=math.exp(centre + high)
    )
