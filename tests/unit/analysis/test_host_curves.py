"""Counters become the rates that they rose at; pairs of repeats show the sidecar's effect."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest

from paceline.analysis.host_curves import rates, sidecar_effects
from paceline.analysis.statistics import series
from paceline.analysis.usage import risen


@dataclass(frozen=True)
class _Sample:
    unix_s: float
    value: float | None


def _rates(*points, seldom=False):
    samples = [_Sample(unix_s, value) for unix_s, value in points]
    return rates(samples, lambda s: s.value, seldom=seldom)


def test_a_rate_is_the_rise_over_the_time_since_the_sample_before() -> None:
    assert _rates((10.0, 100), (12.0, 140), (12.5, 140)) == [None, 20.0, 0.0]


def test_what_was_not_measured_has_no_rate_and_is_bridged() -> None:
    assert _rates((0.0, 0), (1.0, None), (4.0, 8)) == [None, None, 2.0]


def test_a_counter_that_began_anew_has_no_rate_there() -> None:
    assert _rates((0.0, 50), (1.0, 10), (2.0, 14)) == [None, None, 4.0]


def test_a_sample_at_once_after_another_counts_with_the_next() -> None:
    assert _rates((0.0, 0), (1.0, 10), (1.001, 11), (2.0, 20)) == [None, 10.0, None, 10.0]


def test_a_counter_that_is_seldom_read_rises_from_change_to_change() -> None:
    points = ((0.0, 5), (1.0, 5), (2.0, 5), (3.0, 35), (4.0, 35))
    assert _rates(*points, seldom=True) == [None, None, None, 10.0, None]
    assert _rates(*points) == [None, 0.0, 0.0, 30.0, 0.0]


def test_what_the_sidecar_cost_goes_on_after_it_was_started_again() -> None:
    assert risen([5.0, 6.0, 8.0, 0.5, 1.5]) == pytest.approx(3.0 + 0.5 + 1.0)
    assert risen([4.0]) == 0


@dataclass
class _Analysis:
    """What of a TrialAnalysis counts here."""

    record: object
    repeat: int
    step_s: object


def _repeat(trial, repeat, seconds, *, enabled):
    @dataclass
    class Record:
        trial: object

    telemetry = trial.telemetry.model_copy(update={"enabled": enabled})
    steps = seconds * np.exp(0.01 * np.random.default_rng(repeat).standard_normal(200))
    return _Analysis(
        record=Record(trial.model_copy(update={"telemetry": telemetry})),
        repeat=repeat,
        step_s=series(steps, f"{repeat}"),
    )


@pytest.mark.parametrize(("factor", "differs"), [(1.0, False), (1.2, True)])
def test_repeats_with_and_without_the_sidecar_are_held_against_each_other(
    fabricate, factor, differs
) -> None:
    trial = fabricate.make_trial_value(fabricate.MPI)
    repeats = [
        _repeat(trial, n, factor if n % 2 == 0 else 1.0, enabled=n % 2 == 0) for n in range(12)
    ]
    (effect,) = sidecar_effects([repeats])
    assert effect.configuration == trial.configuration
    assert effect.pairs == 6
    assert effect.step_ratio.median == pytest.approx(factor, rel=0.01)
    assert effect.step_ratio.contains(1) is not differs


def test_without_repeats_of_both_kinds_there_is_nothing_to_say(fabricate) -> None:
    trial = fabricate.make_trial_value(fabricate.MPI)
    assert sidecar_effects([[_repeat(trial, n, 1.0, enabled=True) for n in range(4)]]) == []
    without_steps = dataclasses.replace(_repeat(trial, 1, 1.0, enabled=False), step_s=None)
    with_sidecar = _repeat(trial, 0, 1.0, enabled=True)
    assert sidecar_effects([[with_sidecar, without_steps]]) == []
