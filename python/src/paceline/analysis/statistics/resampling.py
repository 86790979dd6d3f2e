"""Resampled means of autocorrelated steps, for predictions.

Steps are resampled in moving blocks (Davison and Hinkley, Bootstrap Methods and their Application,
1997, section 8.2.3; block length n^(1/3): Hall, Horowitz, Jing, Biometrika 82(3), 1995). Equal keys
and values give equal draws.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

DRAWS = 2000
_SEED = 20220131
_LONG = 1000  # steps from which means are drawn from their normal distribution


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


def _generator(key: str) -> np.random.Generator:
    return np.random.default_rng([_SEED, zlib.crc32(key.encode())])


def _block_length(steps: int) -> int:
    return min(steps, math.ceil(math.pow(steps, 1 / 3)))
