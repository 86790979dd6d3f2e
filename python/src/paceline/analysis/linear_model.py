"""Linear models of main effects: shares of R^2, residuals, and permutation tests.

The share of a group of columns is the mean of its increase of R^2 over all orders in which the
groups enter (R. H. Lindeman, P. F. Merenda and R. Z. Gold: Introduction to Bivariate and
Multivariate Analysis, 1980; U. Groemping, The American Statistician 61(2), 2007).
"""

from __future__ import annotations

from itertools import combinations
from math import factorial
from typing import TYPE_CHECKING

import numpy as np
import scipy

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]

PERMUTATIONS = 499


def mean_increases(designs: Mapping[str, Matrix], values: Matrix) -> Matrix:
    """Return the mean increase of R^2 by each group of columns, shape (groups, columns of values).

    designs: the columns of each group. values: centred, each column is a model of its own.
    """
    names = list(designs)
    total = np.maximum((values**2).sum(axis=0), 1e-300)
    explained: dict[frozenset[str], Matrix] = {frozenset(): np.zeros(values.shape[1])}
    for size in range(1, len(names) + 1):
        for chosen in combinations(names, size):
            basis = scipy.linalg.orth(np.hstack([designs[name] for name in chosen]), rcond=1e-9)
            explained[frozenset(chosen)] = ((basis.T @ values) ** 2).sum(axis=0) / total
    shares = np.zeros((len(names), values.shape[1]))
    for place, name in enumerate(names):
        others = [other for other in names if other != name]
        for size in range(len(others) + 1):
            weight = factorial(size) * factorial(len(others) - size) / factorial(len(names))
            for before in combinations(others, size):
                gain = explained[frozenset((*before, name))] - explained[frozenset(before)]
                shares[place] += weight * gain
    return shares


def dummies(levels: Sequence[Hashable]) -> Matrix:
    """Return a column of zeros and ones for each level."""
    known = list(dict.fromkeys(levels))
    return np.array([[float(level == other) for other in known] for level in levels])


def members(levels: Sequence[Hashable]) -> list[NDArray[np.int64]]:
    """Return the places of each level."""
    found: dict[Hashable, list[int]] = {}
    for place, level in enumerate(levels):
        found.setdefault(level, []).append(place)
    return [np.array(places) for places in found.values()]


def residuals(base: Matrix, values: Matrix) -> Matrix:
    """Return what the columns of `base` do not explain."""
    if not base.shape[1]:
        return values
    found: Matrix = values - base @ np.linalg.lstsq(base, values, rcond=1e-9)[0]
    return found


def correlation(
    first: NDArray[np.float64], second: NDArray[np.float64], generator: np.random.Generator
) -> tuple[float, float]:
    """Return the correlation of residuals and its permutation p-value."""
    scale = float(np.linalg.norm(first) * np.linalg.norm(second))
    if scale < 1e-9:
        return 0.0, 1.0
    found = float(first @ second) / scale
    permuted = np.stack([generator.permutation(first) for _ in range(PERMUTATIONS)])
    reached = int(np.sum(np.abs(permuted @ second) / scale >= abs(found) - 1e-12))
    return found, (1 + reached) / (1 + PERMUTATIONS)
