"""Rank correlation and its permutation test."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from paceline.analysis.statistics.intervals import rank_correlation


def test_same_order_of_five_is_one_of_all_permutations() -> None:
    found = rank_correlation(np.array([1.0, 2, 3, 4, 5]), np.array([1.0, 4, 9, 16, 25]))
    assert found.correlation == pytest.approx(1.0)
    assert found.p_value == pytest.approx(2 / 120)  # this order and the reversed one


def test_correlation_agrees_with_scipy() -> None:
    random = np.random.default_rng(1)
    first, second = random.standard_normal((2, 12))
    second[3] = second[4]  # a tie
    second += first
    found = rank_correlation(first, second)
    expected = stats.spearmanr(first, second)
    assert found.correlation == pytest.approx(expected.statistic)
    assert found.p_value == pytest.approx(expected.pvalue, abs=0.02)
    assert found == rank_correlation(first, second)


def test_too_few_or_all_equal_values_have_none() -> None:
    assert rank_correlation(np.array([1.0, 2.0]), np.array([1.0, 2.0])) is None
    assert rank_correlation(np.ones(4), np.arange(4.0)) is None
