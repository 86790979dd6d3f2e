"""Time by message size, from rows whose every time is known."""

from __future__ import annotations

import pytest
from tests.unit.analysis.fabricate import LAUNCHED, MPI, Case, make_run, make_trial_value

from paceline.analysis.reading import load_trial
from paceline.records.files import JsonlWriter
from paceline.records.rows import CommunicationRow
from paceline.tune.comm.message_times import BinTimes, bin_times, compare_messages
from paceline.tune.findings import Finding
from paceline.tune.spaces import Target

CASE = Case(steps=6, warmup_steps=2)
TRAINED = LAUNCHED + MPI.launch_s + MPI.imports_s + MPI.rendezvous_s + 1.0 + 0.125


@pytest.fixture
def files(tmp_path):
    run = make_run(tmp_path / "run", [MPI], cases=[CASE])
    return run, run.trial(make_trial_value(MPI, CASE).id)


def operation(step, *, payload, arrived, ended, sequence=0, started=None, ranks=2, group="0"):
    """Times from the step's middle on, in milliseconds."""
    middle = TRAINED + (step + 0.5) * MPI.step_s
    return CommunicationRow(
        group=group, ranks=ranks, sequence=10 * step + sequence, operation="allreduce",
        algorithm=None, payload_bytes=payload, arrived_unix_s=middle + arrived / 1e3,
        started_unix_s=None if started is None else middle + started / 1e3,
        ended_unix_s=middle + ended / 1e3, sent_bytes=None, sent_messages=None,
    )  # fmt: skip


def write(trial, rank, rows):
    with JsonlWriter(trial.rank(rank).communication) as file:
        for row in rows:
            file.write(row)


def times_of(trial):
    times = bin_times(load_trial(trial))
    assert times is not None
    return times


def test_time_is_from_the_last_ranks_turn_to_each_ranks_end_by_step(files):
    _, trial = files
    steps = range(CASE.steps)
    write(trial, 0, [operation(s, payload=4000, arrived=0, ended=30) for s in steps])
    write(trial, 1, [operation(s, payload=4000, arrived=20, ended=32) for s in steps])
    times = times_of(trial)
    assert times[0] == pytest.approx((0.010 + 0.012) / 2, abs=1e-6)
    assert times[1:] == (None, None, None, None)


def test_waiting_in_a_groups_queue_is_not_the_operations_time(files):
    _, trial = files
    rows = [operation(s, payload=10**5, arrived=0, started=40, ended=50) for s in range(CASE.steps)]
    for rank in (0, 1):
        write(trial, rank, rows)
    assert times_of(trial)[1] == pytest.approx(0.010, abs=1e-6)


def test_messages_are_told_apart_by_size_and_warm_up_does_not_count(files):
    _, trial = files
    sizes = (99_999, 10**5, 10**6, 10**7, 10**8)
    slow_start = [operation(s, payload=10**6, arrived=0, ended=500) for s in (0, 1)]
    steady = [
        operation(s, payload=size, arrived=0, ended=1 + number, sequence=number)
        for s in range(2, CASE.steps)
        for number, size in enumerate(sizes)
    ]
    for rank in (0, 1):
        write(trial, rank, slow_start + steady)
    assert times_of(trial) == pytest.approx((0.001, 0.002, 0.003, 0.004, 0.005), abs=1e-6)


def test_operation_that_a_rank_did_not_end_and_barriers_do_not_count(files):
    _, trial = files
    whole = [operation(s, payload=400, arrived=0, ended=1) for s in range(CASE.steps)]
    barrier = operation(4, payload=0, arrived=0, ended=90, sequence=2)
    write(trial, 0, [*whole, operation(4, payload=400, arrived=0, ended=90, sequence=1), barrier])
    write(trial, 1, [*whole, barrier])
    assert times_of(trial)[0] == pytest.approx(0.001, abs=1e-6)


def test_trial_without_records_of_operations_has_no_times(files):
    assert bin_times(load_trial(files[1])) is None


def test_default_and_best_are_compared_with_the_total(files):
    run, trial = files
    for rank in (0, 1):
        write(trial, rank, [operation(s, payload=400, arrived=0, ended=1) for s in range(6)])
    value = make_trial_value(MPI, CASE)
    finding = Finding(
        target=Target(workload="tiny", name="trials[2]"), default=value,
        default_samples_per_s=None, fastest=value, fastest_samples_per_s=None, ratio=None,
        candidates=1, left_out=(), failures={}, cut_short=False, repeats=(0,),
    )  # fmt: skip
    rows = compare_messages(finding, run)
    assert [row.name for row in rows] == [
        "0-10^5", "10^5-10^6", "10^6-10^7", "10^7-10^8", ">10^8", "total",
    ]  # fmt: skip
    assert rows[0].improvement_percent == pytest.approx(0)
    assert rows[1].default_s is None
    assert rows[-1].default_s == rows[-1].best_s == rows[0].best_s


def test_improvement_is_the_share_of_the_defaults_time_that_is_gone():
    # the first row of table I of Anthony et al. (2020): 1866.0 and 1635.1 ms, 12.3 % (rounded down)
    row = BinTimes(name="0-10^5", default_s=1.8660, best_s=1.6351)
    assert row.improvement_percent == pytest.approx(12.37, abs=0.01)
    assert BinTimes(name=">10^8", default_s=None, best_s=3.2).improvement_percent is None
