"""Ties are decided at 5 % for the whole family of pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.analysis.statistics.noise import RunNoise, RunNoises, run_noise
from paceline.analysis.statistics.pairwise import Pairwise
from paceline.analysis.statistics.resampling import Series

UNKNOWN = RunNoises(pooled=None)


def noise_of_all(deviation: float, degrees: float) -> RunNoises:
    return RunNoises(pooled=RunNoise(deviation=deviation, degrees=degrees))


def repeats(*log_medians: float, spread: float = 0.0) -> dict[int, Series]:
    draws = spread * np.random.default_rng(1).standard_normal(2000)
    return {
        number: Series(log_median=value, log_draws=value + draws)
        for number, value in enumerate(log_medians)
    }


def test_ratio_and_significance_follow_from_students_t() -> None:
    # differences 0.1, 0.2, 0.3: mean 0.2, deviation 0.1; standard error 1.1602 x 0.1 / sqrt 3
    rates = {"a": repeats(0.1, 0.2, 0.3), "b": repeats(0.0, 0.0, 0.0)}
    pairs = Pairwise(["a", "b"], rates, UNKNOWN)
    ((first, second, ratio),) = pairs.ties()
    assert (first, second) == ("a", "b")
    assert ratio.median == pytest.approx(math.exp(0.2))
    half = 4.302653 * 0.1 * 1.1602 / math.sqrt(3)
    assert math.log(ratio.high) == pytest.approx(0.2 + half, rel=1e-5)


def test_difference_without_noise_is_no_tie_and_equal_values_are() -> None:
    rates = {"a": repeats(0.5), "b": repeats(0.0), "c": repeats(0.0)}
    pairs = Pairwise(["a", "b", "c"], rates, UNKNOWN)
    assert [(a, b) for a, b, _ in pairs.ties()] == [("b", "c")]
    assert not pairs.is_tie("b", "a")


def test_holm_asks_more_of_a_pair_in_a_larger_family() -> None:
    # a normal difference of 2.2 standard errors: p = 0.028
    rates = {"a": repeats(2.2, spread=1 / math.sqrt(2)), "b": repeats(0.0, spread=1 / math.sqrt(2))}
    rates["a"][0].log_draws[:] = 2.2 + np.random.default_rng(2).standard_normal(2000) / math.sqrt(2)
    assert not Pairwise(["a", "b"], rates, UNKNOWN).is_tie("a", "b")
    rates |= {"c": repeats(0.1, spread=0.7), "d": repeats(-0.1, spread=0.7)}
    assert Pairwise(["a", "b", "c", "d"], rates, UNKNOWN).is_tie("a", "b")


def test_configurations_without_a_common_repeat_are_not_tested() -> None:
    rates = {"a": {0: repeats(0.5)[0]}, "b": {1: repeats(0.0)[0]}, "c": repeats(0.0, 0.0)}
    pairs = Pairwise(["a", "b", "c"], rates, noise_of_all(1e-6, 20))
    assert pairs.is_tie("a", "b")
    assert not pairs.is_tie("a", "c")


def test_pair_with_one_common_repeat_has_the_noise_of_all() -> None:
    rates = {"a": repeats(0.05), "b": repeats(0.0)}
    assert not Pairwise(["a", "b"], rates, noise_of_all(0.01, 10)).is_tie("a", "b")
    assert Pairwise(["a", "b"], rates, noise_of_all(0.02, 10)).is_tie("a", "b")


def test_equal_configurations_rarely_differ_in_the_whole_family() -> None:
    random = np.random.default_rng(8)
    wrong = 0
    for _ in range(100):
        cells = random.normal(0, 0.02, (6, 3)) + random.normal(0, 0.1, 3)
        rates = {str(n): repeats(*row.tolist()) for n, row in enumerate(cells)}
        noise = run_noise(rates)
        wrong += len(list(Pairwise(list(rates), rates, noise).ties())) < 15
    assert wrong <= 12  # a 5 % test of a family: P(more than 12 of 100) is below 0.2 %
