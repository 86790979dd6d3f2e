"""Rates of steps, and of rounds of steps."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.analysis.steps import GlobalSteps


def steps_of(times_s: list[float], samples: int = 8) -> GlobalSteps:
    ended = np.cumsum(times_s)
    return GlobalSteps(
        step=np.arange(len(times_s)),
        samples=np.full(len(times_s), samples),
        time_s=np.array(times_s),
        ended_unix_s=ended,
        loss=np.ones(len(times_s)),
    )


def test_every_steady_step_has_a_rate_of_its_own():
    steps = steps_of([9.0, 1.0, 2.0])
    assert steps.samples_per_s(1).tolist() == [8.0, 4.0]
    assert steps.step_s(1).tolist() == [1.0, 2.0]


def test_rounds_count_their_averaging_and_only_whole_ones_count():
    # averaged after steps 2, 5 and 8; the warm-up ends inside the first round
    steps = steps_of([1.0, 1.0, 7.0, 1.0, 1.0, 4.0, 1.0, 1.0, 6.0, 1.0])
    assert steps.samples_per_s(2, 3).tolist() == [4.0, 3.0]
    assert steps.step_s(2, 3).tolist() == [2.0, pytest.approx(8 / 3)]


def test_without_a_whole_round_all_steady_steps_are_one():
    steps = steps_of([5.0, 1.0, 3.0])
    assert steps.samples_per_s(1, 10).tolist() == [4.0]
    assert steps.step_s(1, 10).tolist() == [2.0]


def test_without_steady_steps_there_is_no_rate():
    assert len(steps_of([1.0]).samples_per_s(1)) == 0
    assert len(steps_of([1.0]).step_s(1, 4)) == 0
