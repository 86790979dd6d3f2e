"""Pairs of repeats show the effect of the sidecar on step times."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest

from paceline.analysis.sidecar_effect import sidecar_effects
from paceline.analysis.statistics import series


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
