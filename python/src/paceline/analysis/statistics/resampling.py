"""Resampled medians and means of autocorrelated steps, and of repeats.

Steps are resampled in moving blocks, repeats with replacement (Davison and Hinkley, Bootstrap
Methods and their Application, 1997, sections 3.8 and 8.2.3; block length n^(1/3): Hall, Horowitz,
Jing, Biometrika 82(3), 1995). Equal keys and values give equal draws.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import scipy

if TYPE_CHECKING:
    from numpy.typing import NDArray

DRAWS = 2000
_SEED = 20220131
_PART_ELEMENTS = 2_000_000  # steps resampled at a time, to bound memory
_LONG = 1000  # steps from which the distribution of resampled medians is computed, not simulated
_THRESHOLDS = 27  # points at which it is computed
_REACH = 4.0  # standard deviations from the median within which it is computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One repeat's positive per-step values, reduced: logarithm of the median, and of resamples."""

    log_median: float
    log_draws: NDArray[np.float64]  # shape (DRAWS,)


def log_median_draws(values: NDArray[np.float64], key: str) -> NDArray[np.float64]:
    """Return the logarithms of the medians of DRAWS moving-block resamples of `values`."""
    generator = _generator(key)
    if len(values) < _LONG:
        return np.log(_simulated_medians(values, generator))
    return _computed_log_medians(values, generator)


def mean_draws(values: NDArray[np.float64], key: str) -> NDArray[np.float64]:
    """Return the means of DRAWS moving-block resamples of several series at once.

    Every draw resamples the same steps of all series, so sums of series stay sums. From _LONG steps
    on, the means are drawn from their normal distribution, whose covariance is that of the sums of
    blocks.
    values: shape (series, steps), at least one step. key: names the values. Returns shape (DRAWS,
    series).
    """
    generator = _generator(key)
    steps = values.shape[1]
    length = _block_length(steps)
    blocks = -(-steps // length)
    sums = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
    means = (sums[:, length:] - sums[:, :-length]) / length
    if steps < _LONG:
        starts = generator.integers(0, steps - length + 1, (DRAWS, blocks))
        draws: NDArray[np.float64] = means[:, starts].mean(axis=2).T
        return draws
    covariance = np.atleast_2d(np.cov(means)) / blocks
    # a sum of parts is singular; rounding can make an eigenvalue slightly negative
    size, vectors = np.linalg.eigh(covariance)
    normal = generator.standard_normal((DRAWS, len(values))) * np.sqrt(np.maximum(size, 0.0))
    drawn: NDArray[np.float64] = means.mean(axis=1) + normal @ vectors.T
    return drawn


def bootstrap_medians(draws: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return DRAWS medians over repeats that are drawn with replacement.

    draws: of the median of each repeat, shape (repeats, DRAWS).
    """
    repeats = len(draws)
    which, column = _chosen_draws(repeats)
    medians: NDArray[np.float64] = np.median(draws[which, column], axis=1)
    return medians


def bootstrap_means(draws: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return DRAWS means over repeats that are drawn with replacement.

    draws: of the means of each repeat, shape (repeats, DRAWS, series). Returns (DRAWS, series).
    """
    which, column = _chosen_draws(len(draws))
    means: NDArray[np.float64] = draws[which, column].mean(axis=1)
    return means


def _generator(key: str) -> np.random.Generator:
    return np.random.default_rng([_SEED, zlib.crc32(key.encode())])


def _block_length(steps: int) -> int:
    return min(steps, math.ceil(math.pow(steps, 1 / 3)))


def _simulated_medians(
    values: NDArray[np.float64], generator: np.random.Generator
) -> NDArray[np.float64]:
    steps = len(values)
    length = _block_length(steps)
    blocks = -(-steps // length)
    medians = np.empty(DRAWS)
    part = max(1, _PART_ELEMENTS // steps)
    for start in range(0, DRAWS, part):
        count = min(part, DRAWS - start)
        starts = generator.integers(0, steps - length + 1, (count, blocks, 1))
        chosen = (starts + np.arange(length)).reshape(count, -1)[:, :steps]
        medians[start : start + count] = np.median(values[chosen], axis=1)
    return medians


def _computed_log_medians(
    values: NDArray[np.float64], generator: np.random.Generator
) -> NDArray[np.float64]:
    """Draw from the distribution of the resampled median without resampling.

    The median of a resample is at most x if at least half of its values are. The number of such
    values is a sum over independent blocks. For many blocks it is nearly normal, with the mean and
    variance of the number in one block. Evaluating this at thresholds around the median gives the
    distribution. The draws are its quantiles at equal distances, in random order.
    """
    steps, logs = len(values), np.log(values)
    length = _block_length(steps)
    blocks = -(-steps // length)
    ordered = np.sort(logs)
    centre = float(np.median(ordered))
    _, spread = _share_below(logs, np.array([centre]), length, blocks)
    if spread[0] == 0:
        return np.full(DRAWS, centre)
    reach = min(0.5, _REACH * spread[0])
    ranks = np.linspace(0.5 - reach, 0.5 + reach, _THRESHOLDS) * (steps - 1)
    thresholds = np.interp(ranks, np.arange(steps), ordered)
    share, spread = _share_below(logs, thresholds, length, blocks)
    probability = scipy.special.ndtr((share - 0.5) / np.maximum(spread, 1e-12))
    uniform = (generator.permutation(DRAWS) + 0.5) / DRAWS
    draws: NDArray[np.float64] = np.interp(uniform, np.maximum.accumulate(probability), thresholds)
    return draws


def _share_below(
    values: NDArray[np.float64], thresholds: NDArray[np.float64], length: int, blocks: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean and deviation of the share of a resample that is at most each threshold."""
    is_below = values[None, :] <= thresholds[:, None]
    counts = np.cumsum(is_below, axis=1, dtype=np.int32)
    in_block = counts[:, length - 1 :].astype(np.float64)
    in_block[:, 1:] -= counts[:, :-length]
    mean = in_block.mean(axis=1)
    variance = np.einsum("ij,ij->i", in_block, in_block) / in_block.shape[1] - mean**2
    return mean / length, np.sqrt(np.maximum(variance, 0.0) / blocks) / length


@cache
def _chosen_draws(repeats: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose repeats and their draws for each resample of repeats, shapes (DRAWS, repeats)."""
    generator = np.random.default_rng([_SEED, repeats])
    which = generator.integers(0, repeats, (DRAWS, repeats))
    return which, generator.integers(0, DRAWS, (DRAWS, repeats))
