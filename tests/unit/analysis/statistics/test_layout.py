"""Ratios and speeds of the configurations of one run: values by hand, and coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from paceline.analysis.statistics.layout import fit_layout, log_ratio, log_speed

NAN = math.nan


def run(
    random: np.random.Generator, deviations: list[float], repeats: int, shared: float = 0.03
) -> np.ndarray:
    noise = np.array(deviations)[:, None] * random.standard_normal((len(deviations), repeats))
    return noise + shared * random.standard_normal(repeats)


def test_ratio_is_that_of_the_geometric_means() -> None:
    logs = np.log([[100.0, 110, 95], [50, 54, 49], [70, 75, 71]])
    layout = fit_layout(logs)
    assert layout.log_means == pytest.approx(logs.mean(axis=1))
    found = [log_ratio(layout, each, 1).value for each in range(3)]
    assert found == pytest.approx((logs - logs[1]).mean(axis=1))


def test_two_configurations_have_the_paired_t_interval() -> None:
    logs = np.array([[0.1, 0.3, 0.25], [0.0, 0.1, 0.2]])
    found = log_ratio(fit_layout(logs), 0, 1)
    interval = stats.ttest_rel(logs[0], logs[1]).confidence_interval()
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_shared_variance_is_that_of_a_two_way_layout() -> None:
    # residual sum of squares of one outlying cell d in a 3 x 3 layout: d^2 (1-1/3)(1-1/3)
    layout = fit_layout(np.array([[0.0, 1.0, 2.0], [5.0, 6.0, 7.0], [3.0, 4.0, 5.3]]))
    assert layout.degrees == 4
    assert layout.variance == pytest.approx(0.09 * 4 / 9 / 4)


def test_missing_repeat_of_a_slow_machine_does_not_favour_a_configuration() -> None:
    logs = np.array([[0.0, 0.0, -1.0], [0.0, 0.0, NAN], [0.1, 0.1, -0.9]])
    layout = fit_layout(logs)
    found = [log_ratio(layout, each, 0) for each in range(3)]
    assert [each.value for each in found if each is not None] == pytest.approx([0.0, 0.0, 0.1])


def test_configurations_without_common_repeats_cannot_be_compared() -> None:
    layout = fit_layout(np.array([[0.0, 0.1, NAN, NAN], [NAN, NAN, 0.0, 0.2], [NAN] * 4]))
    assert log_ratio(layout, 0, 1) is None
    assert log_ratio(layout, 0, 2) is None
    assert log_speed(layout, 2) is None


def test_common_configuration_connects_others() -> None:
    layout = fit_layout(np.array([[0.0, 0.1, NAN], [NAN, 1.0, 2.0], [NAN, NAN, 2.5]]))
    assert log_ratio(layout, 2, 0).value == pytest.approx(0.5 + 0.9)


def test_repeat_that_only_one_configuration_has_changes_nothing() -> None:
    logs = np.array([[0.0, 0.12, 0.1, 0.9], [0.2, 0.3, 0.33, NAN], [0.1, 0.2, 0.25, NAN]])
    alone, without = fit_layout(logs), fit_layout(logs[:, :3])
    ours, theirs = log_ratio(alone, 0, 1), log_ratio(without, 0, 1)
    assert (ours.value, ours.low) == pytest.approx((theirs.value, theirs.low))


def test_one_repeat_has_no_known_noise() -> None:
    layout = fit_layout(np.array([[0.0], [0.5]]))
    found = log_ratio(layout, 1, 0)
    assert layout.degrees == 0
    assert (found.value, found.low, found.high) == (0.5, -math.inf, math.inf)


def test_noisy_configuration_does_not_enlarge_the_variance_of_the_others() -> None:
    layout = fit_layout(run(np.random.default_rng(3), [0.2, *[0.01] * 8], 6))
    assert math.sqrt(layout.variance) == pytest.approx(0.01, rel=0.4)
    assert layout.noisier[0] > 0.99
    assert layout.noisier[1:].max() < 0.7
    assert math.sqrt(layout.own_variances[0]) == pytest.approx(0.2, rel=0.7)


@pytest.mark.parametrize("repeats", [3, 5, 10])
@pytest.mark.parametrize("noisy", [0.02, 0.08])
def test_ratio_intervals_cover_the_truth(noisy: float, repeats: int) -> None:
    """93 to 97 %, and three standard errors of 200 correlated runs on either side."""
    random = np.random.default_rng([5, repeats])
    covered = []
    for _ in range(200):
        layout = fit_layout(run(random, [noisy, *[0.02] * 8], repeats))
        found = [log_ratio(layout, index, 0) for index in range(1, 9)]
        covered += [each is not None and each.contains(0.0) for each in found]
    assert 0.90 <= np.mean(covered) <= 0.985


@pytest.mark.parametrize("shared", [0.0, 0.05])
@pytest.mark.parametrize("repeats", [3, 5])
def test_interval_of_a_speed_contains_what_all_share(shared: float, repeats: int) -> None:
    random = np.random.default_rng([6, repeats])
    covered = []
    for _ in range(300):
        found = log_speed(fit_layout(run(random, [0.02] * 6, repeats, shared)), 2)
        covered.append(found is not None and found.contains(0.0))
    assert 0.91 <= np.mean(covered) <= 0.99
