"""Rates of steps, and of rounds of steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import polars as pl
import pytest
from tests.unit.analysis import fabricate
from tests.unit.analysis.operations import two_buckets

from paceline.analysis.trial.communication import trial_communication
from paceline.analysis.trial.phases import trial_phases
from paceline.analysis.trial.reading import load_trial
from paceline.analysis.trial.steps import (
    GlobalSteps,
    global_steps,
    rank_steps,
    read_steps,
    samples_rate,
)
from paceline.analysis.trial.stragglers import find_straggler
from paceline.measure.records.files import JsonlWriter
from paceline.measure.records.rows import ContinuationRow, StepRow
from paceline.measure.records.tables import format_of


def steps_of(times_s: list[float], samples: int = 8) -> GlobalSteps:
    ended = np.cumsum(times_s)
    return GlobalSteps(
        step=np.arange(len(times_s)),
        epoch=np.zeros(len(times_s), dtype=np.int64),
        samples=np.full(len(times_s), samples),
        time_s=np.array(times_s),
        ended_unix_s=ended,
        loss=np.ones(len(times_s)),
    )


def rounds_of(steps: GlobalSteps, warmup_steps: int, period: int = 1) -> list[list[float]]:
    """Return samples, seconds and steps of each round."""
    return [
        values.tolist()
        for values in dataclasses.replace(steps, warmup_steps=warmup_steps).rounds(period)
    ]


def test_every_steady_step_is_a_round():
    steps = steps_of([9.0, 1.0, 2.0])
    assert rounds_of(steps, 1) == [[8.0, 8.0], [1.0, 2.0], [1.0, 1.0]]


def test_rounds_count_their_averaging_and_only_whole_ones_count():
    # averaged after steps 2, 5 and 8; the warm-up ends inside the first round
    steps = steps_of([1.0, 1.0, 7.0, 1.0, 1.0, 4.0, 1.0, 1.0, 6.0, 1.0])
    assert rounds_of(steps, 2, 3) == [[24.0, 24.0], [6.0, 8.0], [3.0, 3.0]]


def test_without_a_whole_round_all_steady_steps_are_one():
    steps = steps_of([5.0, 1.0, 3.0])
    assert rounds_of(steps, 1, 10) == [[16.0], [4.0], [2.0]]


def test_without_steady_steps_there_is_no_rate():
    assert rounds_of(steps_of([1.0]), 1) == [[], [], []]
    assert rounds_of(steps_of([1.0]), 1, 4)[:2] == [[], []]


def rows_of(steps: list[int], **columns: list[float | None]) -> pl.DataFrame:
    frame = pl.DataFrame({"step": steps, "samples": [4] * len(steps), **columns})
    missing = {name: None for name in format_of(StepRow).types if name not in frame.columns}
    return frame.with_columns(**missing)


def test_ranks_are_aligned_by_step_and_the_last_of_two_rows_counts(tmp_path):
    record = load_trial(fabricate.make_one(tmp_path))
    first = rows_of([0, 1, 1, 2], step_s=[1.0, 9.0, 2.0, 3.0])
    second = rows_of([1, 3], step_s=[4.0, 5.0])
    found = rank_steps(record, {0: first, 1: second})
    assert found.step.tolist() == [0, 1, 2, 3]
    assert found["step_s"][0, :3].tolist() == [1.0, 2.0, 3.0]
    assert found.is_finished.tolist() == [[True, True, True, False], [False, True, False, True]]
    assert found.of_rank(1)["step"].to_list() == [1, 3]
    assert global_steps(record, found).step.tolist() == [1]


def test_steps_after_a_failure_are_left_out_of_every_figure(tmp_path):
    files = fabricate.make_one(tmp_path)
    continued = ContinuationRow(
        before_started_unix_s=None,
        before_state="running",
        before_state_unix_s=None,
        before_steps=7,
        before_ended_unix_s=None,
        process_started_unix_s=fabricate.LAUNCHED,
        resumed_steps=5,
        restored_unix_s=fabricate.LAUNCHED,
    )
    two_buckets(files)
    for _, rank in files.ranks():
        with JsonlWriter(rank.continuations) as rows:
            rows.write(continued)
    record = load_trial(files)
    steps = read_steps(record)
    steady = [2, 3, 4, 7, 8, 9, 10, 11]
    slow = np.isin(steps.step, [0, 1, 5, 6])
    for name in ("forward_s", "step_s", "ended_s"):
        steps[name][:, slow] += 0.5  # any figure that counts one of these steps shows it

    common = global_steps(record, steps)
    assert common.step[common.steady].tolist() == steady
    assert steps.steady().step.tolist() == steady
    way = fabricate.MPI
    assert [rank.step["forward"] for rank in trial_phases(record, steps)] == pytest.approx(
        [way.forward_s, way.forward_s]
    )
    (found,) = find_straggler(record, steps, {0: 0.0, 1: 0.0})
    assert found.steps == len(steady)
    profile = trial_communication(record)
    assert [rank.steps for rank in profile.ranks] == [len(steady)] * 2
    assert [each.count for each in profile.bins] == [2 * len(steady)] * 2
    assert all(check.passed for check in profile.checks)
    assert samples_rate(record, common).rate == pytest.approx(
        common.samples[common.steady].sum() / common.time_s[common.steady].sum()
    )


def test_loss_is_a_mean_also_if_one_step_has_no_samples(tmp_path):
    record = load_trial(fabricate.make_one(tmp_path))
    rows = rows_of([0, 1], step_s=[1.0, 1.0], loss_sum=[4 * 1.5, 1.25])
    rows = rows.with_columns(samples=pl.Series([4, None]))
    found = global_steps(record, rank_steps(record, {0: rows, 1: rows}))
    assert found.loss.tolist() == [1.5, 1.25]
    assert not found.samples_known
    assert found.samples.tolist() == [1, 1]


@pytest.mark.parametrize("steps", [40, 80])
def test_what_is_kept_for_the_comparison_belongs_to_no_step_and_no_speed(tmp_path, steps):
    way, case = fabricate.MPI, fabricate.Case(steps=steps)
    files = fabricate.make_one(tmp_path, way, case=case)
    kept = [16, 40, 78] if steps == 80 else [16]  # after the first 16, half, all but two

    def wait_before(row):
        pauses = sum(row["step"] >= done for done in kept)
        row["started_unix_s"] += 0.5 * pauses
        row["comm_ready_unix_s"] += 0.5 * pauses

    for _, rank in files.ranks():
        fabricate.edit_rows(rank.steps, wait_before)
    record = load_trial(files)
    found = global_steps(record)
    assert found.time_s == pytest.approx([way.step_s] * steps, rel=1e-4)
    profile = trial_communication(record)
    assert [rank.wall_s for rank in profile.ranks] == pytest.approx([way.step_s] * 2, rel=1e-4)
