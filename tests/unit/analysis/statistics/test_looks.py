"""The stopping rule of `repeats = "auto"`: its levels, its false alarms and its power."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.analysis.statistics.fastest import Fastest
from paceline.analysis.statistics.intervals import levels
from paceline.analysis.statistics.rates import RepeatRate, RunRates

MOST = 8
LEVELS = levels(MOST)
MARGIN = 0.05
BETWEEN, SHARED = 0.015, 0.01  # deviations of log rates


def simulated(
    random: np.random.Generator, true: list[float], repeats: int = MOST
) -> dict[str, dict[int, RepeatRate]]:
    """Repeats of configurations with these true log speeds.

    A repeat differs by the noise of its process, and by what all share in a repeat.
    """
    logs = np.array(true)[:, None] + random.normal(0, BETWEEN, (len(true), repeats))
    logs += random.normal(0, SHARED, repeats)
    return {str(name): rates_of(row.tolist()) for name, row in enumerate(logs)}


def rates_of(log_rates: list[float]) -> dict[int, RepeatRate]:
    return {repeat: RepeatRate(log_rate=value) for repeat, value in enumerate(log_rates)}


def stopped(rates: dict[str, dict[int, RepeatRate]]) -> tuple[int, Fastest]:
    """Return the number of repeats of a run, and the comparison that its table shows."""
    for repeats, level in LEVELS.items():
        known = {name: {r: found[r] for r in range(repeats)} for name, found in rates.items()}
        shown = RunRates(known).fastest(level=level, margin=MARGIN)
        if not shown.undecided:
            break
    return repeats, shown


@pytest.mark.parametrize("configurations", [2, 5])
def test_equal_configurations_rarely_differ_in_the_final_table(configurations: int) -> None:
    random = np.random.default_rng(configurations)
    runs, wrong = 60, 0
    for _ in range(runs):
        _, shown = stopped(simulated(random, [0.0] * configurations))
        wrong += len(shown.not_separated) < configurations - 1
    assert wrong <= 0.05 * runs


def test_true_difference_of_5_percent_is_found_in_4_of_5_runs() -> None:
    random = np.random.default_rng(3)
    runs, found, repeats = 50, 0, []
    for _ in range(runs):
        count, shown = stopped(simulated(random, [math.log(1.05), 0.0]))
        found += shown.leader == "0" and not shown.not_separated
        repeats.append(count)
    assert found >= 0.8 * runs
    assert np.mean(repeats) < 0.8 * MOST


def test_fastest_looks_faster_than_it_is_only_where_others_are_as_fast() -> None:
    random = np.random.default_rng(6)
    errors = []
    for lead in (0.0, 0.05):
        true = [0.0, 0.6 + lead, *[0.6] * 7]
        found = []
        for _ in range(20):
            rates = simulated(random, true)
            repeats, shown = stopped(rates)
            known = {name: {r: each[r] for r in range(repeats)} for name, each in rates.items()}
            ratio = RunRates(known).log_ratio(shown.leader, "0")
            found.append(ratio.value - true[int(shown.leader)])
        errors.append(np.mean(found))
    assert 0.004 < errors[0] < 0.013
    assert abs(errors[1]) < 0.004


def test_large_differences_need_few_repeats() -> None:
    random = np.random.default_rng(4)
    repeats, _ = stopped(simulated(random, [1.0, 0.5, 0.0, -0.5]))
    assert repeats <= 3


def test_configuration_within_the_margin_is_decided_and_one_near_it_is_not() -> None:
    quiet = {"a": 0.0, "b": -0.01, "c": -0.04}
    rates = RunRates(
        {
            name: rates_of([value, value + 0.02 * (name == "b"), value - 0.02 * (name == "c")])
            for name, value in quiet.items()
        }
    )
    assert rates.fastest(level=0.05, margin=0.5).undecided == ()
    assert rates.fastest(level=0.001, margin=0.02).undecided == ("b", "c")


def test_nothing_to_rank_is_decided() -> None:
    assert RunRates({}).fastest().undecided == ()
    alone = simulated(np.random.default_rng(5), [0.0], 2)
    assert RunRates(alone).fastest().undecided == ()
