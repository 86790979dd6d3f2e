"""Intervals of means, differences and single trials: values by hand, and coverage on both sides."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from paceline.analysis.statistics.intervals import (
    LEAST_STEPS,
    Estimate,
    holm,
    mean_interval,
    mean_over_steps,
    satterthwaite,
    single_trial_log_mean,
    spread_of_pairs,
    welch_difference,
)

NAN = math.nan


def autocorrelated(random: np.random.Generator, rho: float, shape: tuple[int, int]) -> np.ndarray:
    noise = random.standard_normal(shape)
    for step in range(1, shape[1]):
        noise[:, step] = rho * noise[:, step - 1] + math.sqrt(1 - rho**2) * noise[:, step]
    return noise


def test_mean_has_the_interval_of_students_t() -> None:
    found = mean_interval(np.array([1.0, 2.0, NAN, 6.0]))
    expected = stats.t.interval(0.95, 2, 3.0, stats.sem([1, 2, 6]))
    assert (found.value, found.low, found.high) == pytest.approx((3.0, *expected))
    assert found.p_value == pytest.approx(stats.ttest_1samp([1, 2, 6], 0).pvalue)


def test_single_repeat_says_nothing_of_others() -> None:
    found = mean_interval(np.array([1.0]))
    assert (found.low, found.high, found.p_value) == (-math.inf, math.inf, 1.0)
    ratio = found.exponential()
    assert (ratio.low, ratio.high) == (0.0, math.inf)


def test_no_repeats_have_no_interval() -> None:
    assert mean_interval(np.array([NAN])) is None


def test_pairs_of_new_values_exceed_the_spread_in_5_percent() -> None:
    draws = np.random.default_rng(7).standard_normal((4000, 7))
    beyond = [abs(draw[5] - draw[6]) > spread_of_pairs(draw[:5]) for draw in draws]
    assert np.mean(beyond) == pytest.approx(0.05, abs=0.0104)  # three standard errors


def welch(before: list[float], after: list[float]) -> Estimate:
    first, second = mean_interval(np.array(before)), mean_interval(np.array(after))
    return welch_difference(first, second)


def test_two_runs_are_compared_by_welch() -> None:
    before, after = [1.0, 1.2, 1.1], [2.0, 2.8, 2.1, 2.4]
    found = welch(before, after)
    expected = stats.ttest_ind(after, before, equal_var=False)
    interval = expected.confidence_interval()
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.p_value == pytest.approx(expected.pvalue)


def test_one_run_with_a_single_repeat_gives_no_verdict() -> None:
    found = welch([1.0], [2.0, 2.1, 2.2])
    assert found.p_value == 1.0
    assert not math.isfinite(found.high)


@pytest.mark.parametrize(
    ("p_values", "rejected"),
    [
        ({"a": 0.03, "b": 0.001, "c": 0.04, "d": 0.02}, {"b"}),  # 0.02 > 0.05 / 3: stop
        ({"a": 0.01, "b": 0.02, "c": 0.03}, {"a", "b", "c"}),
        ({"a": 0.02, "b": NAN, "c": 0.04}, {"a", "c"}),
        ({}, set()),
    ],
)
def test_holm_steps_down(p_values: dict[str, float], rejected: set[str]) -> None:
    assert holm(p_values) == rejected


def test_few_steps_have_no_interval() -> None:
    steps = np.linspace(1.0, 1.1, LEAST_STEPS)
    assert single_trial_log_mean(steps) is not None
    assert single_trial_log_mean(steps[:-1]) is None


def test_centre_is_the_total_time_so_stalls_count() -> None:
    steps = np.full(40, 0.1)
    steps[::5] = 0.6
    assert math.exp(single_trial_log_mean(steps).value) == pytest.approx(0.2)


def test_equal_steps_have_an_interval_without_width() -> None:
    found = single_trial_log_mean(np.full(40, 0.1))
    assert (found.low, found.high, found.is_reliable) == (found.value, found.value, True)


@pytest.mark.parametrize(
    ("variances", "degrees", "expected"),
    [
        ([1e-6, 1e-6], [4, 4], 8.0),  # alike: the degrees add up
        ([4e-6, 0.0], [3, 5], 3.0),  # of the only one that varies
        ([2.0, 1.0], [3, 5], 9 / (4 / 3 + 1 / 5)),
        ([0.0, 0.0], [3, 5], 3.0),  # the fewest
    ],
)
def test_degrees_of_a_sum_of_variances(
    variances: list[float], degrees: list[int], expected: float
) -> None:
    found = satterthwaite(np.array(variances), np.array(degrees))
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("rho", [0.0, 0.5])
@pytest.mark.parametrize("steps", [20, 50, 200])
def test_interval_of_a_single_trial_covers_the_truth(rho: float, steps: int) -> None:
    """Between 93 and 97 %, and three standard errors of 1,000 trials on either side."""
    random = np.random.default_rng([7, steps])
    values = np.exp(0.1 * autocorrelated(random, rho, (1000, steps)) - 0.005)
    found = [single_trial_log_mean(row) for row in values]
    covered = np.mean([each is not None and each.contains(0.0) for each in found])
    assert 0.91 <= covered <= 0.98


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_mean_over_steps_covers_the_truth(rho: float) -> None:
    steps = autocorrelated(np.random.default_rng(11), rho, (600, 120))
    found = [mean_over_steps(values) for values in steps]
    assert 0.91 <= np.mean([each.contains(0.0) for each in found]) <= 0.975
    assert (rho > 0) == (np.mean([mean_interval(v).contains(0.0) for v in steps]) < 0.9)


def test_few_or_equal_steps_have_the_interval_of_independent_ones() -> None:
    for values in ([1.0], [2.0, 2.0, 2.0], [1.0, 3.0, 1.0, 3.0]):
        assert mean_over_steps(np.array(values)) == mean_interval(np.array(values))
    assert mean_over_steps(np.array([])) is None


def test_strong_autocorrelation_of_short_trials_is_marked() -> None:
    random = np.random.default_rng(7)
    marked = {}
    for steps in (30, 200):
        values = np.exp(0.1 * autocorrelated(random, 0.8, (300, steps)))
        found = [each for row in values if (each := single_trial_log_mean(row)) is not None]
        marked[steps] = np.mean([not each.is_reliable for each in found])
    assert marked[30] > 0.5
    assert marked[200] < 0.05
