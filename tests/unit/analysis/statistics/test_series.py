"""Intervals must cover the truth about as often as they say, also over few repeats."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.analysis.statistics.noise import RunNoise, run_noise
from paceline.analysis.statistics.resampling import (
    Series,
    _computed_log_medians,
    _simulated_medians,
)
from paceline.analysis.statistics.series import (
    Interval,
    mean_interval,
    median_interval,
    ratio_interval,
    series,
)


def _repeats(
    random: np.random.Generator, truth: float, repeats: int, between: float, within: float
) -> dict[int, Series]:
    """Steps with lognormal noise whose median is `truth`, and run-to-run noise on top."""
    found = {}
    for r in range(repeats):
        level = truth * math.exp(between * random.standard_normal())
        values = level * np.exp(within * random.standard_normal(30))
        one = series(values, f"{truth}/{r}/{random.integers(1 << 30)}")
        assert one is not None
        found[r] = one
    return found


def test_median_is_that_of_the_repeats_medians() -> None:
    repeats = {
        i: series(np.array(v), str(i))
        for i, v in enumerate([[1.0, 2.0, 3.0], [4.0, 4.0, 9.0], [8.0, 8.0, 8.0]])
    }
    interval = median_interval({k: v for k, v in repeats.items() if v is not None})
    assert interval is not None
    assert interval.median == pytest.approx(4.0)
    assert interval.low <= 4.0 <= interval.high


def test_equal_input_gives_equal_intervals() -> None:
    values = np.random.default_rng(1).lognormal(size=40)
    first, second = (
        median_interval({0: s}) for s in (series(values, "a"), series(values, "a")) if s
    )
    assert first == second


def test_no_steps_give_no_interval() -> None:
    assert series(np.zeros(0), "a") is None
    assert median_interval({}) is None


def test_constant_steps_give_an_interval_of_no_width() -> None:
    one = series(np.full(20, 5.0), "a")
    assert one is not None
    interval = median_interval({0: one})
    assert interval is not None
    assert (interval.low, interval.median, interval.high) == pytest.approx((5.0, 5.0, 5.0))


def test_ratio_is_taken_within_repeats_so_a_common_drift_cancels() -> None:
    drift = [1.0, 3.0, 0.5]
    fast = {r: series(np.full(10, 2.0 * d), f"f{r}") for r, d in enumerate(drift)}
    slow = {r: series(np.full(10, 1.0 * d), f"s{r}") for r, d in enumerate(drift)}
    ratio = ratio_interval(
        {r: s for r, s in fast.items() if s}, {r: s for r, s in slow.items() if s}
    )
    assert ratio is not None
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_ratio_uses_common_repeats_only() -> None:
    one, two, ten = (series(np.full(10, v), str(v)) for v in (1.0, 2.0, 10.0))
    assert one is not None
    assert two is not None
    assert ten is not None
    ratio = ratio_interval({0: two, 1: ten}, {0: one})
    assert ratio is not None
    assert ratio.median == pytest.approx(2.0)
    assert ratio_interval({1: two}, {0: one}) is None


@pytest.mark.parametrize(("repeats", "between"), [(2, 0.03), (3, 0.03), (5, 0.0), (1, 0.0)])
def test_speedup_intervals_cover_the_truth_about_as_often_as_they_say(
    repeats: int, between: float
) -> None:
    random = np.random.default_rng(5)
    truths = (10.0, 18.0, 17.0, 12.0)
    covered = trials = 0
    for _ in range(60):
        measured = [_repeats(random, t, repeats, between, 0.08) for t in truths]
        noises = run_noise({str(number): found for number, found in enumerate(measured)})
        for number, (truth, found) in enumerate(zip(truths[1:], measured[1:], strict=True), 1):
            interval = ratio_interval(found, measured[0], noises.of_ratio(str(number), "0"))
            assert isinstance(interval, Interval)
            covered += interval.contains(truth / truths[0])
            trials += 1
    assert 0.90 <= covered / trials <= 1.0


def test_two_repeats_are_widened_to_students_t() -> None:
    # medians e^-0.01 and e^+0.01: own deviation 0.01 sqrt 2, t(1) = 12.706 over sqrt 2
    repeats = {r: series(np.full(9, math.exp(v)), str(r)) for r, v in enumerate([-0.01, 0.01])}
    interval = median_interval({r: s for r, s in repeats.items() if s})
    assert interval is not None
    assert math.log(interval.high) == pytest.approx(0.12706, rel=1e-4)
    assert math.log(interval.low) == pytest.approx(-0.12706, rel=1e-4)


def test_noise_known_from_other_configurations_narrows_two_repeats() -> None:
    repeats = {r: series(np.full(9, math.exp(v)), str(r)) for r, v in enumerate([-0.01, 0.01])}
    own = {r: s for r, s in repeats.items() if s}
    alone = median_interval(own)
    informed = median_interval(own, RunNoise(deviation=0.01, degrees=10))
    assert alone is not None
    assert informed is not None
    assert informed.high < alone.high


def test_one_repeat_has_the_noise_of_the_other_configurations() -> None:
    one = series(np.full(9, 1.0), "0")
    assert one is not None
    interval = median_interval({0: one}, RunNoise(deviation=0.01, degrees=10))
    assert interval is not None
    assert math.log(interval.high) == pytest.approx(0.0222814, rel=1e-5)  # t(10) = 2.22814


@pytest.mark.parametrize(("confidence", "least"), [(0.95, 0.9), (0.99, 0.96)])
def test_intervals_of_a_mean_cover_it_about_as_often_as_they_say(
    confidence: float, least: float
) -> None:
    random, covered = np.random.default_rng(11), 0
    for n in range(200):
        found = mean_interval(random.normal(-0.3, 1.0, 60), str(n), confidence)
        assert found is not None
        covered += found.low <= -0.3 <= found.high
    assert least <= covered / 200


def test_mean_of_no_steps_has_no_interval() -> None:
    assert mean_interval(np.zeros(0), "none") is None


@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_computed_distribution_of_medians_agrees_with_resampling(correlation: float) -> None:
    noise = np.random.default_rng(3).standard_normal(3000)
    level = np.zeros(3000)
    for step in range(1, 3000):
        level[step] = correlation * level[step - 1] + noise[step]
    values = np.exp(0.05 * level)
    simulated = np.log(_simulated_medians(values, np.random.default_rng(1)))
    computed = _computed_log_medians(values, np.random.default_rng(1))
    width = float(np.ptp(np.quantile(simulated, [0.025, 0.975])))
    for share in (0.025, 0.5, 0.975):
        expected = float(np.quantile(simulated, share))
        assert float(np.quantile(computed, share)) == pytest.approx(expected, abs=0.06 * width)
    assert np.std(computed) == pytest.approx(np.std(simulated), rel=0.05)


def test_long_series_without_noise_has_no_width() -> None:
    one = series(np.full(5000, 5.0), "a")
    assert one is not None
    assert np.ptp(one.log_draws) == 0


def test_equal_configurations_are_mostly_ties_and_different_ones_are_not() -> None:
    random = np.random.default_rng(11)
    ties = separated = 0
    for _ in range(40):
        measured = [_repeats(random, t, 3, 0.01, 0.05) for t in (10.0, 10.0, 12.0, 15.0)]
        noises = run_noise({str(number): found for number, found in enumerate(measured)})
        same = ratio_interval(measured[1], measured[0], noises.of_ratio("1", "0"))
        other = ratio_interval(measured[3], measured[0], noises.of_ratio("3", "0"))
        assert same is not None
        assert other is not None
        ties += same.contains(1)
        separated += not other.contains(1)
    assert ties >= 36
    assert separated == 40
