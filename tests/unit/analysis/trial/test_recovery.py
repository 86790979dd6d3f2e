"""The cost of a failure, computed from records with known times."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from tests.support.rows import survived

from paceline.analysis.trial.recovery import (
    checkpoint_delay_s,
    failure_costs,
    recoveries,
    recovery_values,
)
from paceline.analysis.trial.steps import GlobalSteps, resumed_steps
from paceline.measure.records.files import JsonlWriter
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.rows import (
    CheckpointRow,
    ContinuationRow,
    FailureRow,
    InjectedFailureRow,
)

# Steps of 1 s from second 100. Killed in step 8 after 8 s; the checkpoint had 5 steps.
CONTINUED = ContinuationRow(
    before_started_unix_s=90.0,
    before_state="running",
    before_state_unix_s=91.0,
    before_steps=8,
    before_ended_unix_s=108.0,
    process_started_unix_s=112.0,
    resumed_steps=5,
    restored_unix_s=115.0,
)
PEER = dataclasses.replace(CONTINUED, before_state="failed", before_state_unix_s=109.0)


class FakeSteps:
    step = np.arange(10)

    def __getitem__(self, name):
        assert name == "ended_s"
        return np.array([[*range(101, 106), *range(117, 122)]] * 2, dtype=float)


@pytest.fixture
def record(tmp_path):
    rows = enumerate([CONTINUED, PEER])
    ranks = tuple(SimpleNamespace(rank=rank, continuations=(row,)) for rank, row in rows)
    return SimpleNamespace(files=TrialFiles(tmp_path), ranks=ranks)


def write(path, *found):
    with JsonlWriter(path) as rows:
        rows.write_all(found)


def test_parts_of_a_failure_that_the_supervisor_noticed(record):
    write(
        record.files.failures,
        FailureRow(detected_unix_s=110.0, ended_unix_s=111.0, failed_rank=0, message="killed"),
    )
    (found,) = recoveries(record, FakeSteps())
    assert (found.failed_rank, found.lost_steps) == (0, 3)
    assert found.lost_work_s == 3.0
    assert (found.detect_s, found.restart_s, found.restore_s) == (2.0, 2.0, 3.0)
    assert found.next_step_s == 2.0
    assert found.total_s == 12.0
    assert recovery_values(found)["total_s"] == 12.0


def test_moment_of_an_injected_failure_is_known(record):
    write(record.files.injected, InjectedFailureRow(unix_s=108.5, rank=1))
    (found,) = recoveries(record, FakeSteps())
    assert (found.failed_rank, found.kind) == (1, "rank")
    assert found.detect_s == pytest.approx(0.5)  # the other rank wrote so, at 109


def test_injected_failure_belongs_to_the_first_recovery_after_it(record):
    write(record.files.injected, InjectedFailureRow(unix_s=108.5, rank=1, kind="host"))
    again = dataclasses.replace(CONTINUED, process_started_unix_s=130.0, restored_unix_s=131.0)
    for rank in record.ranks:
        rank.continuations = (*rank.continuations, again)
    assert [found.kind for found in recoveries(record, FakeSteps())] == ["host", None]


def test_failure_right_after_another_one_counts_its_own_time_only(record):
    write(
        record.files.injected,
        InjectedFailureRow(unix_s=108.5, rank=1),
        InjectedFailureRow(unix_s=116.0, rank=1, kind="executor"),
    )
    write(
        record.files.failures,
        *(
            FailureRow(detected_unix_s=s, ended_unix_s=s, failed_rank=1, message="killed")
            for s in (109.0, 116.5)
        ),
    )
    # killed before it had ended a step: the last row is still that of the first attempt
    again = dataclasses.replace(
        CONTINUED, before_steps=5, before_ended_unix_s=105.0, process_started_unix_s=116.75,
        restored_unix_s=116.8,
    )  # fmt: skip
    for rank in record.ranks:
        rank.continuations = (CONTINUED, again)
    first, second = recoveries(record, FakeSteps())
    assert (first.detect_s, first.next_step_s) == (0.5, None)  # step 5 ended after the second one
    assert (second.kind, second.detect_s, second.lost_work_s) == ("executor", 0.5, 0.0)
    assert second.next_step_s == pytest.approx(0.2)


def test_under_torchrun_the_first_rank_that_failed_has_noticed_it(record):
    (found,) = recoveries(record, FakeSteps())
    assert found.failed_rank is None
    assert found.detect_s == 1.0


def test_trial_without_failures(record):
    for rank in record.ranks:
        rank.continuations = ()
    assert recoveries(record, FakeSteps()) == ()
    assert resumed_steps(record).tolist() == []


def test_recovery_and_the_warm_up_after_it_are_not_steady(record):
    steps = GlobalSteps(
        step=np.arange(12),
        epoch=np.zeros(12, dtype=np.int64),
        samples=np.ones(12, dtype=np.int64),
        time_s=np.ones(12),
        ended_unix_s=np.arange(12.0),
        loss=np.ones(12),
        warmup_steps=2,
        resumed=resumed_steps(record),
    )
    assert steps.step[steps.steady].tolist() == [2, 3, 4, 7, 8, 9, 10, 11]
    without_warmup = dataclasses.replace(steps, warmup_steps=0)
    assert np.flatnonzero(~without_warmup.steady).tolist() == [5]


def test_delay_by_a_checkpoint_is_that_of_the_slowest_rank(record):
    row = CheckpointRow(
        steps=5, started_unix_s=10.0, blocked_s=0.1, ended_unix_s=12.0, written_bytes=100
    )
    slow = dataclasses.replace(row, blocked_s=0.3)
    failed = dataclasses.replace(row, blocked_s=9.0, error="No space left on device")
    write(record.files.rank(0).checkpoints, failed, row, row)
    write(record.files.rank(1).checkpoints, slow, slow)
    assert checkpoint_delay_s(record) == 0.3


def test_costs_of_different_failures_are_kept_apart():
    failures = [survived("rank", 1.0), survived("host", 9.0), survived("rank", 3.0)]
    costs = failure_costs("a", failures, [])
    found = {cost.kind: (cost.failures, cost.restore_s) for cost in costs}
    assert found == {"rank": (2, 2.0), "host": (1, 9.0)}
