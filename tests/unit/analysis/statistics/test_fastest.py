"""Comparison with the fastest: false separations, power, ties, and what was too little."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.analysis.statistics.fastest import Fastest
from paceline.analysis.statistics.rates import RepeatRate, RunRates

NAN = math.nan


def run(random: np.random.Generator, deviations: list[float], repeats: int) -> np.ndarray:
    noise = np.array(deviations)[:, None] * random.standard_normal((len(deviations), repeats))
    return noise + 0.03 * random.standard_normal(repeats)


def rates_of(logs: Sequence[Sequence[float]] | np.ndarray) -> RunRates:
    """NaN: a missing repeat."""
    return RunRates(
        {
            str(name): {n: RepeatRate(log_rate=x) for n, x in enumerate(row) if not math.isnan(x)}
            for name, row in enumerate(logs)
        }
    )


def found_of(logs: Sequence[Sequence[float]] | np.ndarray, level: float = 0.05) -> Fastest:
    return rates_of(logs).fastest(level=level)


def test_clear_difference_is_separated_and_close_ones_tie() -> None:
    quiet = 0.002 * np.random.default_rng(1).standard_normal((3, 5))
    found = found_of(quiet + np.array([[0.0], [-0.001], [-0.2]]))
    assert found.leader == "0"
    assert found.not_separated == found.ties == ("1",)
    assert [place.name for place in found.separated] == ["2"]
    assert [place.is_tie for place in found.places] == [False, True, False]
    assert found.undecided == ()
    assert found.further_repeats is None
    assert found.places[2].log_ratio.low > 0.19


def test_absence_of_significance_is_no_tie() -> None:
    found = found_of([[0.0, 0.05, -0.04], [0.01, -0.03, 0.02], [-0.02, 0.03, 0.0]])
    assert len(found.undecided) == 2
    assert not any(place.is_tie for place in found.places)
    assert found.further_repeats > 1
    assert found.detectable > 0.05


def test_one_repeat_gives_no_verdict() -> None:
    found = found_of([[0.0], [1.0]])
    assert found.leader == "1"
    assert found.undecided == ("0",)
    assert (found.detectable, found.further_repeats) == (None, None)


def test_early_look_at_two_repeats_detects_nothing() -> None:
    logs = run(np.random.default_rng(3), [0.02] * 3, 2)
    assert not found_of(logs, 0.05 * (2 / 8) ** 2).separated
    assert found_of(logs, 1e-6).detectable == math.inf


def test_nothing_to_compare() -> None:
    assert found_of([[NAN, NAN]]).leader is None
    only = found_of([[0.0, 0.1], [NAN, NAN]])
    assert (only.leader, only.undecided, only.detectable) == ("0", (), None)
    assert found_of([]).places == ()


def test_configuration_without_common_repeats_is_undecided() -> None:
    found = found_of([[0.5, 0.5, NAN], [0.0, 0.01, NAN], [NAN, NAN, 0.0]])
    assert "2" in found.undecided
    assert found.places[2].log_ratio is None


def test_equal_values_are_not_separated() -> None:
    assert not found_of(np.zeros((4, 3))).separated
    assert found_of([[0.0] * 3, [0.1] * 3, [0.1] * 3]).not_separated == ("2",)


def test_candidates_are_ranked_with_the_noise_of_all() -> None:
    logs = run(np.random.default_rng(2), [0.01] * 6, 4)
    logs[5] += 1
    found = rates_of(logs).fastest(["0", "1", "2"])
    assert [place.name for place in found.places] == ["0", "1", "2"]
    assert not found.separated


def test_equal_input_gives_equal_results() -> None:
    logs = run(np.random.default_rng(2), [0.01] * 6, 4)
    assert found_of(logs) == found_of(logs)


def test_shift_of_a_whole_repeat_changes_nothing() -> None:
    logs = run(np.random.default_rng(2), [0.01] * 6, 3)
    logs[0] += 0.05
    moved = found_of(logs + np.array([0.0, 0.5, -0.5]))
    assert [p.is_separated for p in moved.places] == [p.is_separated for p in found_of(logs).places]


@pytest.mark.parametrize("noisy", [0.02, 0.08])
def test_equal_configurations_are_rarely_separated(noisy: float) -> None:
    """At most 5 % of the runs, and three standard errors."""
    random = np.random.default_rng(11)
    alarms = [bool(found_of(run(random, [noisy, *[0.02] * 8], 3)).separated) for _ in range(80)]
    assert np.mean(alarms) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 80)


def test_two_equal_configurations_have_the_exact_error() -> None:
    random = np.random.default_rng(12)
    alarms = [bool(found_of(run(random, [0.02] * 2, 3)).separated) for _ in range(200)]
    assert 0.01 <= np.mean(alarms) <= 0.1


def test_leader_of_nine_is_separated_from_all() -> None:
    """5 % ahead, noise 1.5 %, five repeats: 80 % of the runs."""
    random = np.random.default_rng(13)
    complete = []
    for _ in range(40):
        logs = run(random, [0.015] * 9, 5)
        logs[0] += math.log(1.05)
        complete.append(len(found_of(logs).separated) == 8)
    assert np.mean(complete) >= 0.6


def test_leader_of_twenty_is_separated_from_most() -> None:
    """8 % ahead, noise 2 %, five repeats: all in the median run.

    Three repeats cannot show that none of twenty was disturbed in all of its repeats, nor that none
    has a noise of its own.
    """
    random = np.random.default_rng(14)
    counts = []
    for _ in range(12):
        logs = run(random, [0.02] * 20, 5)
        logs[0] += math.log(1.08)
        counts.append(len(found_of(logs).separated))
    assert np.median(counts) >= 18


def test_fifty_configurations_take_little_time() -> None:
    logs = run(np.random.default_rng(15), [0.02] * 50, 5)
    begin = time.process_time()
    found_of(logs)
    assert time.process_time() - begin < 1.0  # about 0.2 s
