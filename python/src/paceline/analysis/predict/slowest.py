"""The slowest of n nodes, from the step times of one.

A synchronous step ends with its slowest node. If the nodes' times are independent with distribution
function F, the largest of n has F^n, so its mean is the integral of the quantile function over
u^n (H. A. David and H. N. Nagaraja: Order Statistics, 3rd edition, 2003, section 2.1 and 3.1). The
quantile function is that of the measured steps; nothing is assumed beyond the largest of them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CELLS = 200  # of equal probability below the tail, and as many in the tail
_TAIL = 0.9


def slowest_ratio(
    times: NDArray[np.float64], nodes: NDArray[np.int64], draws: int, seed: int
) -> NDArray[np.float64]:
    """Return the mean of the largest of n times over the mean of one.

    times: of one node, in any order, shape (steps,). nodes: shape (n,). Returns (draws, n): one row
    for each resample of the times, drawn with replacement.
    """
    generator = np.random.default_rng(seed)
    edges = _edges(len(times))
    middles = (edges[1:] + edges[:-1]) / 2
    ordered = np.sort(times)
    weights = np.diff(edges[None, :] ** nodes[:, None], axis=1)
    found = np.empty((draws, len(nodes)))
    for row in range(draws):
        counts = np.bincount(generator.integers(0, len(times), len(times)), minlength=len(times))
        sample = np.repeat(ordered, counts)  # in order, without sorting again
        found[row] = weights @ sample[(middles * len(sample)).astype(int)] / sample.mean()
    return np.where(nodes == 1, 1.0, np.maximum(found, 1.0))


@cache
def _edges(steps: int) -> NDArray[np.float64]:
    """Return the borders of cells of probability, finer towards 1: the largest times decide."""
    tail = 1 - np.geomspace(1 - _TAIL, 0.5 / steps, _CELLS)
    return np.concatenate([np.linspace(0, _TAIL, _CELLS)[:-1], tail, [1.0]])
