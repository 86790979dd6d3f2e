"""The noise between runs, estimated from all configurations together."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from paceline.analysis.statistics.noise import median_efficiency, run_noise, t_quantile
from paceline.analysis.statistics.resampling import DRAWS, Series
from paceline.analysis.statistics.series import ratio_interval


def cells(logs: np.ndarray) -> dict[str, dict[int, Series]]:
    """Configurations 0, 1, … with exact steps. logs: shape (configurations, repeats)."""
    return {
        str(number): {
            r: Series(log_median=v, log_draws=np.full(DRAWS, v)) for r, v in enumerate(row.tolist())
        }
        for number, row in enumerate(logs)
    }


def test_what_all_share_in_a_repeat_is_left_out() -> None:
    # configuration + repeat, but for one cell that is off by 0.3
    noises = run_noise(cells(np.array([[0.0, 1.0, 2.0], [5.0, 6.0, 7.0], [3.0, 4.0, 5.3]])))
    assert noises.pooled is not None
    # residual sum of squares of one outlying cell d in a 3 x 3 layout: d^2 (1-1/3)(1-1/3)
    assert noises.pooled.degrees == pytest.approx(4)
    assert noises.pooled.deviation == pytest.approx(math.sqrt(0.3**2 * (2 / 3) ** 2 / 4))


def test_single_repeats_have_no_noise_to_estimate() -> None:
    noises = run_noise(cells(np.array([[0.0], [1.0]])))
    assert noises.of("0") is None
    assert noises.of_ratio("0", "1") is None


def test_configuration_that_did_not_help_has_the_noise_of_all() -> None:
    noises = run_noise(cells(np.array([[0.0, 0.1], [0.0, 0.0]])))
    assert noises.of("another") == noises.pooled


def test_configurations_of_equal_noise_share_it() -> None:
    random = np.random.default_rng(2)
    noises = run_noise(cells(random.normal(0, 0.03, (4, 6))))
    assert {noises.of(name) for name in "0123"} == {noises.pooled}
    ratio = noises.of_ratio("0", "1")
    assert ratio is not None
    assert noises.pooled is not None
    assert ratio.deviation == pytest.approx(math.sqrt(2) * noises.pooled.deviation)
    assert ratio.degrees == pytest.approx(15)


def test_noisy_configuration_is_told_from_the_quiet_ones() -> None:
    random = np.random.default_rng(3)
    deviations = np.array([0.01] * 7 + [0.2])
    noises = run_noise(cells(random.standard_normal((8, 8)) * deviations[:, None]))
    quiet, noisy = noises.of("1"), noises.of("7")
    assert quiet is not None
    assert noisy is not None
    assert quiet.deviation < 0.05
    assert noisy.deviation > 0.12
    assert noisy.degrees < 49  # of all together


EQUAL, DIFFERENT = (0.03,) * 6, (0.01, 0.02, 0.02, 0.03, 0.04, 0.06)


# Two repeats do not show that variances differ: noisy configurations then have too many.
@pytest.mark.parametrize(
    ("deviations", "repeats"),
    [*((EQUAL, n) for n in (2, 3, 5, 10)), *((DIFFERENT, n) for n in (3, 5, 10))],
)
def test_ratios_of_equal_configurations_differ_in_about_5_percent(
    deviations: tuple[float, ...], repeats: int
) -> None:
    random = np.random.default_rng(repeats)
    found = []
    for _ in range(100):
        shared = random.normal(0, 0.1, repeats)
        noise = random.standard_normal((6, repeats)) * np.array(deviations)[:, None]
        rates = cells(shared + noise)
        noises = run_noise(rates)
        for one, other in combinations(rates, 2):
            interval = ratio_interval(rates[one], rates[other], noises.of_ratio(one, other))
            assert interval is not None
            found.append(not interval.contains(1))
    assert 0.025 < np.mean(found) < 0.08


@pytest.mark.parametrize("repeats", [1, 2, 3, 4, 5, 8, 10, 13, 21])
def test_error_of_a_median_is_that_of_simulated_ones(repeats: int) -> None:
    values = np.random.default_rng(4).standard_normal((40_000, repeats))
    expected = np.median(values, axis=1).std() / values.mean(axis=1).std()
    assert median_efficiency(repeats) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.706), (4, 2.776), (11, 2.201), (20, 2.086), (60, 2.000)]
)
def test_t_quantiles_agree_with_the_nist_table(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=0.003)
