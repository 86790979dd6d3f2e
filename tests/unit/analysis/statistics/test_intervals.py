"""Families of tests, spreads of pairs, and means over the steps of one trial."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from paceline.analysis.statistics.intervals import (
    Estimate,
    holm,
    levels,
    mean_over_steps,
    spread_of_pairs,
)

NAN = math.nan


def autocorrelated(random: np.random.Generator, rho: float, shape: tuple[int, int]) -> np.ndarray:
    noise = random.standard_normal(shape)
    for step in range(1, shape[1]):
        noise[:, step] = rho * noise[:, step - 1] + math.sqrt(1 - rho**2) * noise[:, step]
    return noise


def test_unknown_noise_has_no_bounds() -> None:
    ratio = Estimate(value=0.0).exponential()
    assert (ratio.low, ratio.estimate, ratio.high) == (0.0, 1.0, math.inf)


def test_pairs_of_new_values_exceed_the_spread_in_5_percent() -> None:
    draws = np.random.default_rng(7).standard_normal((4000, 7))
    beyond = [abs(draw[5] - draw[6]) > spread_of_pairs(draw[:5]) for draw in draws]
    assert np.mean(beyond) == pytest.approx(0.05, abs=0.0104)  # three standard errors


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


@pytest.mark.parametrize("most", [2, 3, 8, 100])
def test_looks_share_5_percent(most: int) -> None:
    found = levels(most)
    assert list(found) == list(range(min(3, most), most + 1))
    assert list(found.values())[1:] == sorted(list(found.values())[1:])
    assert sum(found.values()) == pytest.approx(0.05)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_mean_over_steps_covers_the_truth(rho: float) -> None:
    steps = autocorrelated(np.random.default_rng(11), rho, (600, 120))
    found = [mean_over_steps(values) for values in steps]
    assert 0.91 <= np.mean([each.low <= 0 <= each.high for each in found]) <= 0.975


@pytest.mark.parametrize(("rho", "least"), [(0.0, 0.93), (0.5, 0.82)])
def test_few_steps_have_an_interval_of_the_size_of_their_noise(rho: float, least: float) -> None:
    steps = autocorrelated(np.random.default_rng(12), rho, (2000, 6))
    found = [mean_over_steps(values) for values in steps]
    assert np.mean([each.low <= 0 <= each.high for each in found]) >= least
    assert np.quantile([each.high - each.value for each in found], 0.99) < 7  # of a noise of 1


def test_large_delay_is_seen_in_six_steps_of_which_neighbours_resemble() -> None:
    delays = np.array([0.305867, 0.311519, 0.29896, 0.292241, 0.292192, 0.289271])
    found = mean_over_steps(delays, 0.99)
    assert found is not None
    assert 0.2 < found.low < found.value < found.high < 0.4


def test_few_or_equal_steps_have_the_interval_of_independent_ones() -> None:
    found = mean_over_steps(np.array([1.0, 3.0, 1.0, 3.0]))
    low, high = stats.t.interval(0.95, 3, 2.0, stats.sem([1, 3, 1, 3]))
    assert (found.value, found.low, found.high) == pytest.approx((2.0, low, high))
    assert mean_over_steps(np.array([2.0, 2.0])) == Estimate(value=2.0, low=2.0, high=2.0)
    assert mean_over_steps(np.array([1.0])) == Estimate(value=1.0)
    assert mean_over_steps(np.array([])) is None
