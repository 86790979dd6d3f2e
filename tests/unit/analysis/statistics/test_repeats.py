"""The stopping rule of `repeats = "auto"`: its levels, its false alarms and its power."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special

from paceline.analysis.statistics.noise import run_noise
from paceline.analysis.statistics.pairwise import Pairwise
from paceline.analysis.statistics.repeats import levels, undecided
from paceline.analysis.statistics.resampling import DRAWS, Series

MOST = 8
LEVELS = levels(MOST)
MARGIN = 0.05
BETWEEN, SHARED, WITHIN = 0.015, 0.01, 0.003  # deviations of log medians


def simulated(
    random: np.random.Generator, true: list[float], repeats: int = MOST
) -> dict[str, dict[int, Series]]:
    """Repeats of configurations with these true log speeds.

    A repeat differs by the noise of its process, by what all share in a repeat, and by that of its
    steps, which the bootstrap sees.
    """
    size = (len(true), repeats)
    medians = np.array(true)[:, None] + random.normal(0, BETWEEN, size)
    medians += random.normal(0, SHARED, repeats) + random.normal(0, WITHIN, size)
    steps = random.normal(0, WITHIN, DRAWS)
    return {
        str(name): {
            repeat: Series(log_median=value, log_draws=value + steps)
            for repeat, value in enumerate(row.tolist())
        }
        for name, row in enumerate(medians)
    }


def first(rates: dict[str, dict[int, Series]], repeats: int) -> dict[str, dict[int, Series]]:
    return {name: {r: found[r] for r in range(repeats)} for name, found in rates.items()}


def stopped(rates: dict[str, dict[int, Series]]) -> tuple[int, Pairwise]:
    """Return the number of repeats of a run, and the pairs that its table shows."""
    for repeats, level in LEVELS.items():
        known = first(rates, repeats)
        if not undecided(known, level=level, tie_margin=MARGIN):
            break
    return repeats, Pairwise(list(known), known, run_noise(known), level)


def test_levels_of_two_looks_are_those_of_the_bivariate_normal_distribution() -> None:
    """Looks after 2 and 3 repeats spend 0.05 x 4/9 and the rest."""
    found = levels(3)
    assert found[2] == pytest.approx(0.05 * 4 / 9, rel=1e-4)
    bound = -special.ndtri(found[3] / 2) * math.sqrt(3)
    # P(|S2| < a, |S3| > b), by a fine sum over S2
    edge = -special.ndtri(found[2] / 2) * math.sqrt(2)
    s2 = np.linspace(-edge, edge, 200_001)
    density = np.exp(-(s2**2) / 4) / math.sqrt(4 * math.pi)
    beyond = special.ndtr(s2 - bound) + special.ndtr(-s2 - bound)
    assert np.trapz(density * beyond, s2) == pytest.approx(0.05 * 5 / 9, rel=1e-4)


def test_equal_normal_statistics_are_significant_at_any_look_in_5_percent() -> None:
    found = LEVELS
    assert list(found) == list(range(2, MOST + 1))
    assert list(found.values()) == sorted(found.values())
    draws = np.random.default_rng(1).standard_normal((100_000, MOST))
    z = np.cumsum(draws, axis=1) / np.sqrt(np.arange(1, MOST + 1))
    bounds = np.array([math.inf, *(-special.ndtri(level / 2) for level in found.values())])
    share = float(np.mean((np.abs(z) > bounds).any(axis=1)))
    assert share == pytest.approx(0.05, abs=0.0021)  # three standard errors


@pytest.mark.parametrize("configurations", [2, 5])
def test_equal_configurations_rarely_differ_in_the_final_table(configurations: int) -> None:
    random = np.random.default_rng(configurations)
    runs, wrong = 200, 0
    for _ in range(runs):
        _, pairs = stopped(simulated(random, [0.0] * configurations))
        wrong += len(list(pairs.ties())) < configurations * (configurations - 1) // 2
    assert wrong <= 0.05 * runs


def test_true_difference_of_5_percent_is_found_in_4_of_5_runs() -> None:
    random = np.random.default_rng(3)
    runs, found, repeats = 150, 0, []
    for _ in range(runs):
        rates = simulated(random, [math.log(1.05), 0.0])
        count, pairs = stopped(rates)
        known = first(rates, count).values()
        medians = [np.median([s.log_median for s in each.values()]) for each in known]
        found += medians[0] > medians[1] and not pairs.is_tie("0", "1")
        repeats.append(count)
    assert found >= 0.8 * runs
    assert np.mean(repeats) < 0.8 * MOST


def test_large_differences_need_two_repeats_only() -> None:
    random = np.random.default_rng(4)
    repeats, _ = stopped(simulated(random, [1.0, 0.5, 0.0, -0.5]))
    assert repeats == 2


def test_configuration_within_the_margin_is_decided_and_one_near_it_is_not() -> None:
    quiet = {"a": 0.0, "b": -0.01, "c": -0.04}
    rates = {
        name: {
            repeat: Series(log_median=value + noise, log_draws=np.full(DRAWS, value + noise))
            for repeat, noise in enumerate((0.0, 0.02 * (name == "b"), -0.02 * (name == "c")))
        }
        for name, value in quiet.items()
    }
    assert undecided(rates, level=0.05, tie_margin=0.2) == ()
    assert undecided(rates, level=0.001, tie_margin=0.02) == ("b", "c")


def test_nothing_to_rank_is_decided() -> None:
    assert undecided({}, level=0.05, tie_margin=0.05) == ()
    alone = simulated(np.random.default_rng(5), [0.0], 2)
    assert undecided(alone, level=0.05, tie_margin=0.05) == ()
