"""Times must add up to the wall time, and waiting must be told from transfer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.trial.phases import trial_phases
from paceline.analysis.trial.reading import TrialRecord, load_trial
from paceline.analysis.trial.steps import read_steps


def phases_of(record, steps=None):
    return trial_phases(record, read_steps(record) if steps is None else steps)


def waits_of(record: TrialRecord) -> dict[tuple[int, int], float]:
    """Waiting by rank and step."""
    steps = read_steps(record)
    return {
        (rank, step): wait_s
        for rank, row in zip(steps.ranks, steps["comm_wait_s"].tolist(), strict=True)
        for step, wait_s in zip(steps.step.tolist(), row, strict=True)
    }


def test_every_phase_is_what_was_put_in(tmp_path):
    first, second = phases_of(load_trial(fabricate.make_one(tmp_path, clock_offset_s=-3.5)))
    # MPI: rank 0 is 0.02 s ahead of rank 1; 12 steps
    assert first.whole == pytest.approx(
        {
            "launch": 0.8,
            "imports": 2.0,
            "data_load": 1.0,
            "data_wait": 0.12,
            "forward": 1.2,
            "backward": 12 * 0.18,
            "bubble": None,
            "comm_wait": 12 * 0.02,
            "comm_transfer": 12 * 0.01,
            "optimizer": 12 * 0.02,
            "other": 0.25 + 0.125 + 0.5 + 12 * 0.005,
            "teardown": 0.25,
        },
        abs=1e-5,
    )
    assert second.whole["comm_wait"] == pytest.approx(0, abs=1e-5)
    assert second.whole["backward"] == pytest.approx(12 * 0.2)
    assert first.other_parts == pytest.approx(
        {
            "rendezvous": 0.25,
            "model_build": 0.125,
            "restore": None,
            "evaluation": None,
            "bookkeeping": 0.5,
            "replay": None,
        },
        abs=1e-5,
    )


@pytest.mark.parametrize(
    "way",
    ["SEQUENTIAL", "INTRAOP", "TORCHRUN", "MPI", "SPARK", "THREADS", "PIPELINE", "HYBRID"],
)
def test_phases_add_up_to_the_wall_time(tmp_path, way):
    record = load_trial(fabricate.make_one(tmp_path, getattr(fabricate, way), jitter=0.2))
    wall = record.outcome.ended_unix_s - record.outcome.launched_unix_s
    for rank in phases_of(record):
        assert sum(v for v in rank.whole.values() if v is not None) == pytest.approx(wall)
        assert rank.wall_s == pytest.approx(wall)


def test_a_rank_alone_has_no_communication_to_measure(tmp_path):
    (rank,) = phases_of(load_trial(fabricate.make_one(tmp_path, fabricate.SEQUENTIAL)))
    assert rank.whole["comm_wait"] is None
    assert rank.whole["comm_transfer"] is None
    assert rank.step["comm_wait"] is None


def test_step_phases_leave_out_the_warm_up_and_add_up_to_a_step(tmp_path):
    record = load_trial(fabricate.make_one(tmp_path, fabricate.MPI))
    steps = read_steps(record)
    steps["forward_s"][0, :2] = 9.0
    first = phases_of(record, steps)[0]
    assert first.step["forward"] == pytest.approx(0.1)
    assert sum(v or 0 for v in first.step.values()) == pytest.approx(fabricate.MPI.step_s)


def test_waits_follow_the_slowest_rank_of_each_step_on_one_clock(tmp_path):
    waits = waits_of(load_trial(fabricate.make_one(tmp_path, ranks=4, clock_offset_s=120.0)))
    assert waits[0, 5] == pytest.approx(3 * 0.02, abs=1e-5)
    assert waits[2, 5] == pytest.approx(0.02, abs=1e-5)
    assert waits[3, 5] == pytest.approx(0, abs=1e-5)


def test_the_bubble_is_a_phase_of_its_own(tmp_path):
    first, second = phases_of(load_trial(fabricate.make_one(tmp_path, fabricate.PIPELINE)))
    # the second stage computes 0.01 s less and waits 0.01 s more
    assert first.whole["bubble"] == pytest.approx(12 * 0.05)
    assert first.step["bubble"] == pytest.approx(0.05)
    assert second.step["bubble"] == pytest.approx(0.06)
    assert second.step["forward"] == pytest.approx(0.095)
    assert sum(v or 0 for v in second.step.values()) == pytest.approx(fabricate.PIPELINE.step_s)


def test_stages_wait_only_for_the_same_stage_of_other_replicas(tmp_path: Path) -> None:
    # ranks 0 to 3 are 3, 2, 1 and 0 leads early; the first stage is ranks 0 and 2
    waits = waits_of(load_trial(fabricate.make_one(tmp_path, fabricate.HYBRID, lead_s=0.01)))
    assert [waits[rank, 5] for rank in range(4)] == pytest.approx([0.02, 0.02, 0, 0], abs=1e-5)


def test_waiting_is_at_most_the_communication(tmp_path):
    record = load_trial(fabricate.make_one(tmp_path, fabricate.MPI))
    # a clock that is off by a minute must not make waits longer than what was measured
    environment = record.ranks[1].environment
    assert environment is not None
    late = dataclasses.replace(
        record.ranks[1], environment=dataclasses.replace(environment, clock_offset_s=60.0)
    )
    waits = waits_of(dataclasses.replace(record, ranks=(record.ranks[0], late)))
    assert waits[0, 0] == pytest.approx(0.03)


def test_a_trial_without_outcome_has_no_phases(tmp_path):
    record = load_trial(fabricate.make_one(tmp_path, fabricate.MPI))
    assert phases_of(dataclasses.replace(record, outcome=None)) == []
