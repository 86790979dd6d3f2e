"""Rank correlations over blocks and their permutation test."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from paceline.analysis.statistics.intervals import (
    RankCorrelation,
    least_p_value,
    least_units,
    rank_correlation,
    units_to_find,
)


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
    three = np.arange(3.0)
    assert rank_correlation(three, three) is not None
    assert rank_correlation(three, three, given=three[[0, 2, 1]]) is None


def test_order_within_blocks_counts_and_differences_between_blocks_do_not() -> None:
    # within each block the orders are opposed; the second block has more of both
    first = np.array([[1.0, 2, 3, 4], [101, 102, 103, 104]])
    second = np.array([[4.0, 3, 2, 1], [104, 103, 102, 101]])
    assert rank_correlation(first, second).correlation == pytest.approx(-1.0)


def test_more_blocks_of_the_same_units_are_no_more_units() -> None:
    order = np.arange(4.0)
    for blocks in (1, 2, 8):
        many = np.tile(order, (blocks, 1))
        assert rank_correlation(many, many).p_value == pytest.approx(2 / 24)


def test_what_both_have_from_a_third_value_is_taken_out() -> None:
    random = np.random.default_rng(2)
    third = np.arange(20.0)
    first, second = third + random.standard_normal((2, 20))
    plain = rank_correlation(first, second)
    beyond = rank_correlation(first, second, given=third)
    ranks = [stats.rankdata(each) for each in (first, second, third)]
    left = [each - np.polyval(np.polyfit(ranks[2], each, 1), ranks[2]) for each in ranks[:2]]
    assert beyond.correlation == pytest.approx(np.corrcoef(*left)[0, 1])
    assert plain.correlation > 0.9
    assert abs(beyond.correlation) < 0.6
    assert beyond.p_value > 100 * plain.p_value


def _is_found(correlation: RankCorrelation | None) -> bool:
    return correlation is not None and correlation.p_value <= 0.05


@pytest.mark.parametrize("units", [5, 6])
def test_test_is_right_for_units_that_stay_alike_in_several_blocks(units: int) -> None:
    """Simulated: a trace and a speed that belong to a strategy are the same at all places."""
    random = np.random.default_rng(3)
    plain, beyond, runs = 0, 0, 400
    for _ in range(runs):
        local = random.standard_normal(units)
        trace = local + random.standard_normal(units)
        speed = local + random.standard_normal(units)
        unrelated = random.standard_normal(units)
        at_places = [
            each + 0.1 * random.standard_normal((4, units)) for each in (trace, speed, unrelated)
        ]
        plain += _is_found(rank_correlation(at_places[2], at_places[1]))
        beyond += _is_found(rank_correlation(at_places[0], at_places[1], given=local))
    # four standard errors above 5 %
    assert max(plain, beyond) / runs < 0.05 + 4 * (0.05 * 0.95 / runs) ** 0.5


def test_relation_beyond_a_third_value_is_found() -> None:
    random = np.random.default_rng(4)
    found, runs = 0, 100
    for _ in range(runs):
        local, trace = random.standard_normal((2, 7))
        speed = local + 2 * trace + 0.1 * random.standard_normal((3, 7))
        found += _is_found(rank_correlation(np.tile(trace, (3, 1)), speed, given=local))
    assert found > 80


def test_number_of_units_that_a_test_needs() -> None:
    assert least_p_value(4) == pytest.approx(2 / 24)
    assert [least_units(tests) for tests in (1, 3, 4, 6)] == [5, 5, 6, 6]
    # the least for a perfect order, more for a weaker one, never for none
    assert units_to_find(0.999, 1) == 5
    assert units_to_find(0.7, 1) < units_to_find(0.7, 6) < units_to_find(0.5, 6)
    assert units_to_find(0.0, 1) is None
