"""A rank that makes the others wait is named with what it costs; nobody is named by chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.unit.analysis import fabricate

from paceline.analysis.trial.reading import TrialRecord, load_trial
from paceline.analysis.trial.steps import read_steps
from paceline.analysis.trial.stragglers import Straggling, delays_of, find_straggler
from paceline.measure.records.layout import TrialFiles

NO_ERROR = dict.fromkeys(range(8), 0.0)


@pytest.fixture
def make(tmp_path):
    def trial(way=fabricate.MPI, steps=40, **changes):
        return fabricate.make_one(tmp_path, way, case=fabricate.Case(steps=steps), **changes)

    return trial


def straggler_of(record: TrialRecord, errors_s: Any = NO_ERROR) -> tuple[Straggling, ...]:
    return find_straggler(record, read_steps(record), errors_s)


def shift_ready(files: TrialFiles, rank: int, by_s: NDArray[np.float64]) -> None:
    """Move when a rank was ready in each step; its communication must last longer than that."""

    def shift(row: dict[str, Any]) -> None:
        late_s = float(by_s[row["step"]])
        row["comm_ready_unix_s"] += late_s
        row["comm_s"] -= late_s
        assert row["comm_s"] >= 0.0
        row["backward_s"] += late_s

    fabricate.edit_rows(files.rank(rank).steps, shift)


def test_cost_is_the_last_ranks_lead_over_the_next() -> None:
    ready = np.array([[1.0, 2.0, 5.0], [3.0, 2.5, 4.0], [2.0, 9.0, 4.5]])
    assert delays_of(ready).tolist() == [[0, 0, 0.5], [1.0, 0, 0], [0, 6.5, 0]]


@pytest.mark.parametrize("offset_s", [0.0, -3.5])
def test_rank_that_is_always_late_is_named_with_its_loss(make: Any, offset_s: float) -> None:
    record = load_trial(make(lead_s=0.05, clock_offset_s=offset_s))
    (found,) = straggler_of(record, NO_ERROR)
    assert found.straggler == 1
    assert found.steps == 38
    worst = found.ranks[0]
    assert worst.last_share == 1
    assert worst.delay_s.mean == pytest.approx(0.05, abs=1e-5)
    assert worst.delay_s.low <= worst.delay_s.mean <= worst.delay_s.high
    assert worst.delay_share == pytest.approx(0.05 / read_steps(record)["step_s"][0, 0], rel=1e-4)
    # rank 0's backward pass is as much shorter
    assert found.phase == "backward"
    assert found.phase_excess_s == pytest.approx(0.05, abs=1e-6)


def test_rank_for_which_others_wait_within_the_passes_is_named(make: Any) -> None:
    # all ranks are ready at the same time, because each layer waits for rank 1
    (found,) = straggler_of(load_trial(make(lead_s=0.05, pass_comm_s=0.02)))
    assert found.straggler == 1
    assert found.ranks[0].delay_s.mean == pytest.approx(0.05, abs=1e-5)
    assert found.phase == "backward"


def test_rank_that_is_late_now_and_then_costs_its_mean(make: Any) -> None:
    files = make(lead_s=0.0, transfer_s=0.2)
    shift_ready(files, 0, np.where(np.arange(40) % 4 == 0, 0.1, 0.0))
    (found,) = straggler_of(load_trial(files))
    assert found.straggler == 0
    # of steps 2..39, the nine that four divides
    assert found.ranks[0].delay_s.mean == pytest.approx(9 * 0.1 / 38, abs=1e-5)


def test_slowed_rank_is_found_in_noise_to_within_a_tenth(make: Any) -> None:
    noise = np.random.default_rng(5).normal(0, 0.01, (3, 200))
    files = make(steps=200, ranks=3, lead_s=0.0, backward_s=1.0, transfer_s=0.2)
    for rank in range(3):
        shift_ready(files, rank, noise[rank] + (0.05 if rank == 1 else 0.0))
    (found,) = straggler_of(load_trial(files))
    assert found.straggler == 1
    # With two others the last of them is late by 0.56 standard deviations (Blom's expected normal
    # order statistics), so of 0.05 s the others are spared 0.044.
    assert found.ranks[0].delay_s.mean == pytest.approx(0.05 - 0.0056, abs=0.002)
    assert found.ranks[0].delay_s.low < 0.0444 < found.ranks[0].delay_s.high


def test_rank_whose_sum_ends_later_is_not_slow(make: Any) -> None:
    """On a slow link, one rank may end each sum later, and so begin each step later."""
    record = load_trial(make(lead_s=0.0, transfer_s=0.2, clock_offset_s=-3.5, steps=16))
    steps = read_steps(record)
    late = move(record.files, 1, 0.05)
    (found,) = straggler_of(late)
    assert found.straggler is None
    after = read_steps(late).steady()  # before the first step there is no sum
    assert after["own_ready_s"][1] - after["own_ready_s"][0] == pytest.approx(0.05, abs=1e-5)
    assert after["comm_wait_s"] == pytest.approx(np.zeros((2, len(after.step))), abs=1e-5)
    assert after["comm_transfer_s"] == pytest.approx(steps.steady()["comm_s"], abs=1e-5)


def test_trial_without_a_step_can_be_read(make: Any) -> None:
    record = load_trial(make(steps=3))
    for rank in range(2):
        record.files.rank(rank).steps.write_text("")
    assert read_steps(record)["comm_wait_s"].shape == (2, 0)
    assert straggler_of(record)[0].straggler is None


def move(files: TrialFiles, rank: int, by_s: float) -> TrialRecord:
    """Let all steps of a rank begin and end later."""

    def shift(row: dict[str, Any]) -> None:
        row["started_unix_s"] += by_s
        row["comm_ready_unix_s"] += by_s

    fabricate.edit_rows(files.rank(rank).steps, shift)
    return load_trial(files)


@pytest.mark.parametrize("seed", range(8))
def test_ranks_that_are_late_by_chance_are_not_named(make: Any, seed: int) -> None:
    noise = np.random.default_rng(seed).normal(0, 0.02, (2, 100))
    files = make(steps=100, lead_s=0.0, transfer_s=0.2)
    for rank in range(2):
        shift_ready(files, rank, noise[rank])
    (found,) = straggler_of(load_trial(files))
    assert found.straggler is None
    assert "similar delays" in found.reason


def test_rank_that_is_late_once_is_not_named(make: Any) -> None:
    files = make(steps=12, lead_s=0.0, transfer_s=0.2)
    shift_ready(files, 1, np.eye(12)[6] * 0.1)
    (found,) = straggler_of(load_trial(files))
    assert found.straggler is None
    assert "vary too much" in found.reason


@pytest.mark.parametrize(
    ("lead_s", "steps", "errors_s", "reason"),
    [
        (0.05, 6, NO_ERROR, "4 steps are too few"),
        (0.05, 40, {0: 0.0, 1: 0.06}, "smaller than the clock error"),
        (0.002, 40, NO_ERROR, "below 1% of a step"),
    ],
)
def test_what_cannot_or_need_not_be_claimed_is_not(
    make: Any, lead_s: float, steps: int, errors_s: dict[int, float], reason: str
) -> None:
    (found,) = straggler_of(load_trial(make(lead_s=lead_s, steps=steps)), errors_s)
    assert found.straggler is None
    assert reason in found.reason


def test_replicas_of_each_stage_are_judged_among_themselves(make: Any) -> None:
    # replica 1 (ranks 2 and 3) is late in stage 1, rank 3, alone
    files = make(fabricate.HYBRID)
    shift_ready(files, 3, np.full(40, 0.015))
    found = straggler_of(load_trial(files))
    assert [f.stage for f in found] == [0, 1]
    assert [f.straggler for f in found] == [None, 3]
    assert found[1].ranks[0].delay_s.mean == pytest.approx(0.015, abs=1e-5)


def test_pipeline_of_one_replica_has_nobody_to_compare(make: Any) -> None:
    assert straggler_of(load_trial(make(fabricate.PIPELINE))) == ()
