"""Rank correlation with a permutation test."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

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
