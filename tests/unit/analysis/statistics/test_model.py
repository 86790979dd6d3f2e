"""The model of the repeats: what it makes of disturbed repeats, two speeds and missing repeats."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tests.unit.analysis.statistics.test_fastest import rates_of

from paceline.analysis.statistics.model import fit
from paceline.analysis.statistics.rates import RepeatRate, RunRates

NAN = math.nan
QUIET = (0.0, 0.01, -0.01, 0.005, 0.0)


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[4] / "python" / "benchmarks")
    return importlib.import_module("statistics_study")


def beside_others(*rows: tuple[float, ...]) -> RunRates:
    """The rows, and six configurations without a disturbance."""
    random = np.random.default_rng(1)
    others = 0.01 * random.standard_normal((6, len(rows[0])))
    return rates_of([*rows, *others.tolist()])


def test_step_times_of_a_shared_machine() -> None:
    """327, 150, 53, 54 and 61 ms: any reader sees that the truth is near 54."""
    logs = tuple(-math.log(ms / 54) for ms in (327, 150, 53, 54, 61))
    one = tuple(math.log(1 / 1.65) + x for x in QUIET)
    rates = beside_others(logs, one)
    assert rates.ratio("0", "1").estimate == pytest.approx(1.65, rel=0.05)
    chances = rates.disturbed("0")
    assert [chances[n] > 0.9 for n in range(5)] == [True, True, False, False, False]
    assert rates.disturbed_repeats("0") >= {0, 1}


def test_two_speeds_are_both_in_the_interval() -> None:
    rates = beside_others((0.0, -0.5, 0.01, -0.51, 0.0), QUIET)
    found = rates.log_ratio("0", "1")
    assert found.low < -0.49
    assert found.value == pytest.approx(0.0, abs=0.02)
    assert rates.two_speeds("0") > 0.9
    assert rates.two_speeds("1") < 0.1
    assert not rates.disturbed_repeats("0")


def test_measured_load_tells_a_disturbance_from_two_speeds() -> None:
    logs = [(0.0, -0.5, 0.01, -0.52, 0.0), *[QUIET] * 5]
    loaded = np.zeros((6, 5), dtype=bool)
    loaded[0, [1, 3]] = True
    plain, told = fit(np.array(logs)), fit(np.array(logs), loaded)
    assert told.two_speeds[0] < plain.two_speeds[0]
    assert told.disturbed[0, 1] > plain.disturbed[0, 1]


def test_what_all_share_in_a_repeat_cancels_in_a_ratio() -> None:
    random = np.random.default_rng(2)
    logs = 0.01 * random.standard_normal((6, 4))
    quiet, moved = rates_of(logs), rates_of(logs + np.array([0.0, 0.3, -0.3, 0.1]))
    ours, theirs = quiet.log_ratio("0", "1"), moved.log_ratio("0", "1")
    assert theirs.value == pytest.approx(ours.value, abs=0.01)
    assert theirs.high - theirs.low < 1.5 * (ours.high - ours.low)
    assert moved.rate("0").high / moved.rate("0").low > 1.2


def test_missing_repeat_of_a_slow_machine_does_not_favour_a_configuration() -> None:
    rates = rates_of([[0.0, 0.0, -1.0], [0.0, 0.0, NAN], [0.1, 0.1, -0.9]])
    assert rates.log_ratio("1", "0").value == pytest.approx(0.0, abs=0.02)
    assert rates.log_ratio("2", "0").value == pytest.approx(0.1, abs=0.02)


def test_configurations_without_common_repeats_cannot_be_compared() -> None:
    rates = rates_of([[0.0, 0.1, NAN, NAN], [NAN, NAN, 0.0, 0.2], [NAN] * 4])
    assert rates.log_ratio("0", "1") is None
    assert rates.log_ratio("0", "2") is None
    assert rates.rate("2") is None


def test_common_configuration_connects_others() -> None:
    rates = rates_of([[0.0, 0.1, NAN], [NAN, 1.0, 2.0], [NAN, NAN, 2.5]])
    assert rates.log_ratio("2", "0") is not None


def test_one_repeat_has_no_known_noise() -> None:
    rates = rates_of([[0.0], [0.5]])
    assert not rates.has_noise
    found = rates.log_ratio("1", "0")
    assert (found.value, found.low, found.high) == (0.5, -math.inf, math.inf)
    assert rates.disturbed("0") == {}
    assert rates.two_speeds("0") is None


def test_equal_values_and_many_repeats_are_fitted() -> None:
    assert rates_of(np.zeros((3, 3))).ratio("0", "1").estimate == 1
    many = rates_of(0.02 * np.random.default_rng(3).standard_normal((2, 60)))
    found = many.log_ratio("0", "1")
    assert 0.005 < found.high - found.low < 0.03


def test_noisy_configuration_does_not_widen_the_others() -> None:
    random = np.random.default_rng(3)
    logs = np.array([0.2, *[0.01] * 8])[:, None] * random.standard_normal((9, 6))
    speeds = fit(logs).speeds
    assert speeds[0].deviation > 0.03
    assert max(speed.deviation for speed in speeds[1:]) < 0.01


def test_infinite_noise_of_a_rate_is_kept() -> None:
    rate = RunRates({"a": {0: RepeatRate(log_rate=1.0)}}).rate("a")
    assert (rate.low, rate.high) == (0.0, math.inf)


@pytest.mark.parametrize(
    ("situation", "repeats"),
    [
        ("idle", 3),
        ("20 % disturbed", 5),
        ("drift of 20 % over the run", 3),
        ("one configuration is slow in one of four", 5),
        ("three of five repeats of one disturbed", 5),
        ("first repeat cold", 5),
    ],
)
def test_intervals_hold_in_simulated_situations(
    study: ModuleType, situation: str, repeats: int
) -> None:
    """The long version is python/benchmarks/statistics_study.py; here three standard errors."""
    found = study.measured(situation, 6, repeats, 60, 1)
    assert found["covered"] >= 0.9
    assert found["false_separations"] <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 60)
    assert found["error_median"] < 0.02


def test_disturbed_repeats_do_not_hide_a_large_difference(study: ModuleType) -> None:
    """At least 98 %, and three standard errors of 40 runs, of which each finds all or none."""
    found = study.measured("20 % disturbed", *study.POWER_AT, 40, 1)
    assert found["found_1.8"] >= 0.98 - 3 * math.sqrt(0.98 * 0.02 / 40)
    assert found["error_95"] <= 0.03
    assert found["found_5_percent"] >= 0.45


def test_configuration_whose_repeats_were_all_disturbed_is_rarely_separated(
    study: ModuleType,
) -> None:
    """With three repeats, one of 20 has no undisturbed repeat in 42 % of the runs."""
    assert study.measured("30 % disturbed", 20, 3, 40, 1)["false_separations"] <= 0.1
