"""Waiting, transfer, exposed and overlapped time must be what was put in."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tests.unit.analysis import fabricate
from tests.unit.analysis import operations as made

from paceline.analysis.trial.communication import TrialCommunication, trial_communication
from paceline.analysis.trial.reading import load_trial
from paceline.base.errors import DataError
from paceline.measure.records.files import jsonable

MEASURED = 10  # of 12 steps, 2 are warm-up


@pytest.fixture
def make(tmp_path):
    return partial(fabricate.make_one, tmp_path)


def profile(record: Any) -> TrialCommunication:
    found = trial_communication(record)
    assert found is not None
    return found


def test_operations_are_counted_by_size_after_the_warm_up(make: Any) -> None:
    found = profile(made.two_buckets(make()))
    by_size = {(b.least_bytes, b.most_bytes): b for b in found.bins}
    assert set(by_size) == {(10**6, 10**7), (10**7, 10**8)}
    assert [b.count for b in found.bins] == [2 * MEASURED] * 2  # two ranks
    assert by_size[10**6, 10**7].payload_bytes == 2 * MEASURED * made.FIRST_BYTES
    for rank in found.ranks:
        assert [b.count for b in rank.bins] == [MEASURED] * 2


@pytest.mark.parametrize(
    ("size", "least"), [(0, 0), (99_999, 0), (10**5, 10**5), (10**7, 10**7), (10**8, 10**8)]
)
def test_a_bound_belongs_to_the_larger_sizes(make: Any, size: int, least: int) -> None:
    found = profile(made.two_buckets(make(), payload_bytes=size))
    assert {b.least_bytes for b in found.bins} == {least}


@pytest.mark.parametrize("offset_s", [0.0, 3.5, -1000.0])
def test_waiting_is_told_from_transfer_whatever_the_clocks(make: Any, offset_s: float) -> None:
    # rank 0 is ready 0.02 s before rank 1, transfer takes 0.01 s
    found = profile(made.two_buckets(make(lead_s=0.02, clock_offset_s=offset_s)))
    early, late = found.ranks
    for rank, wait_s in ((early, 0.02), (late, 0.0)):
        first, second = rank.bins
        assert first.wait_s == pytest.approx(MEASURED * wait_s, abs=1e-5)
        assert first.transfer_s == pytest.approx(MEASURED * made.FIRST_S, abs=1e-5)
        assert second.wait_s == pytest.approx(MEASURED * wait_s, abs=1e-5)
        assert second.transfer_s == pytest.approx(MEASURED * 0.01, abs=1e-5)
        assert second.bandwidth_bytes_per_s == pytest.approx(made.SECOND_BYTES / 0.01, rel=1e-3)


def test_exposed_and_overlapped_time_are_told_apart(make: Any) -> None:
    # Rank 0 leads by 0.2 s: its first bucket, asked for 0.1 s before its last gradient, ends
    # 0.2 - 0.1 + 0.02 = 0.12 s after it. The second is its own only from then on.
    early, late = profile(made.two_buckets(make(backward_s=0.5, lead_s=0.2))).ranks
    first, second = early.bins
    assert first.exposed_s == pytest.approx(MEASURED * 0.12, abs=1e-5)
    assert first.overlapped_s == pytest.approx(MEASURED * 0.1, abs=1e-5)
    assert second.exposed_s == pytest.approx(MEASURED * (0.2 + 0.01 - 0.12), abs=1e-5)
    assert second.overlapped_s == pytest.approx(0.0, abs=1e-5)
    first, second = late.bins
    assert first.exposed_s == pytest.approx(0.0, abs=1e-5)
    assert first.overlapped_s == pytest.approx(MEASURED * made.FIRST_S, abs=1e-5)
    assert second.exposed_s == pytest.approx(MEASURED * 0.01, abs=1e-5)
    assert early.overlapped_s == pytest.approx(0.1, abs=1e-5)
    assert early.between_s == pytest.approx(0.0, abs=1e-5)


def test_phases_and_profile_add_up_to_the_step(make: Any) -> None:
    found = profile(made.two_buckets(make()))
    for rank in found.ranks:
        assert rank.compute_s + rank.comm_s == pytest.approx(rank.step_s, abs=1e-6)
        assert rank.compute_s + rank.exposed_s == pytest.approx(rank.step_s, rel=0.001)
        assert rank.wall_s == pytest.approx(rank.step_s, rel=1e-6)
    assert [check.passed for check in found.checks] == [True, True]


def test_communication_of_layers_is_divided_and_counted_once(make: Any) -> None:
    def rows(rank, step, ready_s):
        number, begun_s = 2 * step.step, ready_s - 0.1 - step.pass_comm_s
        within = made.row(rank, number, begun_s, ready_s - 0.1, payload_bytes=80, awaited=True)
        return within, made.row(rank, number + 1, ready_s, ready_s + 0.01)

    # in the passes 0.03 s of transfer, and 0.02 s in which rank 0 waits for rank 1
    files = make(lead_s=0.02, pass_comm_s=0.03, transfer_s=0.01)
    profiled = profile(made.in_each_step(files, rows))
    for rank, wait_s in zip(profiled.ranks, (0.02, 0.0), strict=True):
        assert rank.phases_s["comm_wait"] == pytest.approx(wait_s, abs=1e-5)
        assert rank.phases_s["comm_transfer"] == pytest.approx(0.04, abs=1e-5)
        assert rank.exposed_s == pytest.approx(wait_s + 0.04, abs=1e-5)
        assert rank.overlapped_s == pytest.approx(0.0, abs=1e-5)
        assert rank.between_s == pytest.approx(0.0, abs=1e-5)
        statistics, gradients = rank.bins
        assert statistics.exposed_s == pytest.approx(MEASURED * (wait_s + 0.03), abs=1e-5)
        assert statistics.wait_s == pytest.approx(MEASURED * wait_s, abs=1e-5)
        assert gradients.exposed_s == pytest.approx(MEASURED * 0.01, abs=1e-5)
    assert [check.passed for check in profiled.checks] == [True, True]


def test_operations_before_and_after_an_update_are_exposed(make: Any) -> None:
    # 0.01 s of scattering gradients, 0.02 s of the optimiser, 0.02 s of gathering weights
    def end(row: dict[str, Any]) -> None:
        row["comm_ended_unix_s"] = row["comm_ready_unix_s"] + 0.05

    def rows(rank, step, ready_s):
        number, gather_s = 2 * step.step, ready_s + 0.03
        yield made.row(rank, number, ready_s, ready_s + 0.01, operation="alltoall", awaited=True)
        yield made.row(rank, number + 1, gather_s, gather_s + 0.02, operation="alltoall")

    files = make(lead_s=0.0, transfer_s=0.03, optimizer_s=0.02)
    for rank in range(2):
        fabricate.edit_rows(files.rank(rank).steps, end)
    profiled = profile(made.in_each_step(files, rows))
    for rank in profiled.ranks:
        assert rank.exposed_s == pytest.approx(0.03, abs=1e-5)
        assert rank.between_s == pytest.approx(0.0, abs=1e-5)
        assert rank.overlapped_s == pytest.approx(0.0, abs=1e-5)
    assert [check.passed for check in profiled.checks] == [True, True]


def test_evaluations_between_steps_are_no_part_of_their_time(make):
    found = profile(load_trial(make(case=fabricate.Case(evaluate_every_steps=5))))
    assert [check.passed for check in found.checks] == [True]
    for rank in found.ranks:
        assert rank.wall_s == pytest.approx(rank.step_s, rel=1e-6)


def test_operations_that_do_not_fill_the_communication_fail_the_check(make: Any) -> None:
    def half(rank, step, ready_s):
        return [made.row(rank, step.step, ready_s, ready_s + step.comm_s / 2)]

    found = profile(made.in_each_step(make(transfer_s=0.1), half))
    phases, operations = found.checks
    assert phases.passed
    assert not operations.passed
    last = found.ranks[1]
    assert last.between_s == pytest.approx(0.05, abs=1e-5)
    assert operations.difference == pytest.approx(0.06 / last.step_s, abs=1e-4)  # rank 0's


@pytest.mark.parametrize(
    ("spans_s", "time_s", "overlapped_s"),
    [
        ([(0.0, 0.08), (0.01, 0.1)], 0.17, 0.0),  # at the same time
        ([(0.0, 0.08), (0.01, 0.03), (0.04, 0.1)], 0.16, 0.0),  # the second within the first
        ([(0.0, 0.13)], 0.13, 0.03),  # outlasts the step
    ],
)
def test_no_time_of_the_communication_is_exposed_twice(
    make: Any, spans_s: list[tuple[float, float]], time_s: float, overlapped_s: float
) -> None:
    def rows(rank, step, ready_s):
        for number, (start_s, end_s) in enumerate(spans_s, len(spans_s) * step.step):
            yield made.row(rank, number, ready_s + start_s, ready_s + end_s)

    (rank, _) = profile(made.in_each_step(make(lead_s=0.0, transfer_s=0.1), rows)).ranks
    (found,) = rank.bins
    assert found.time_s == pytest.approx(MEASURED * time_s, abs=1e-4)
    assert found.exposed_s == pytest.approx(MEASURED * 0.1, abs=1e-4)
    assert found.overlapped_s == pytest.approx(MEASURED * overlapped_s, abs=1e-4)


def test_waiting_for_its_turn_is_not_waiting_for_a_rank(make: Any) -> None:
    def rows(rank, step, ready_s):
        turn_s = ready_s + 0.03 + 0.02 * rank.rank
        return [made.row(rank, step.step, ready_s, ready_s + 0.1, started_s=turn_s)]

    first, last = profile(made.in_each_step(make(lead_s=0.0, transfer_s=0.1), rows)).ranks
    assert first.bins[0].wait_s == pytest.approx(MEASURED * 0.02, abs=1e-4)
    assert first.bins[0].time_s == pytest.approx(MEASURED * 0.07, abs=1e-4)
    assert last.bins[0].wait_s == pytest.approx(0, abs=1e-4)


def test_wait_shorter_than_the_clocks_error_is_not_claimed(make: Any) -> None:
    files = make(lead_s=0.02, clock_offset_s=3.5)
    fabricate.edit_json(files.rank(1).environment, clock_error_s=0.03)
    found = profile(made.two_buckets(files))
    assert found.clock_error_s == pytest.approx(0.03 + 1e-5)
    first, _ = found.ranks[0].bins
    assert first.wait_s == 0
    assert first.transfer_s == pytest.approx(MEASURED * (made.FIRST_S + 0.02), abs=1e-4)


def test_all_reduce_that_ends_before_the_last_rank_came_betrays_the_clocks(make: Any) -> None:
    files = make(lead_s=0.0, clock_offset_s=3.5)
    made.two_buckets(files)
    # since the clocks were compared, rank 1's has moved by 0.25 s
    fabricate.edit_json(files.rank(1).environment, clock_offset_s=3.75)
    found = profile(load_trial(files))
    # by at least 0.25 s less the second bucket's 0.01 s, at most as much more
    assert found.ranks[0].clock_error_s == pytest.approx(0.26, abs=1e-4)
    assert found.ranks[1].clock_error_s == pytest.approx(1e-5)
    assert found.ranks[0].bins[1].wait_s == 0
    assert found.stragglers[0].straggler is None


def test_operation_that_another_rank_did_not_record_has_no_waiting(make: Any) -> None:
    files = make()
    made.two_buckets(files)
    files.rank(1).communication.unlink()
    found = profile(load_trial(files))
    assert found.operations_recorded
    assert [(b.wait_s, b.transfer_s, b.bandwidth_bytes_per_s) for b in found.bins] == [
        (None, None, None)
    ] * 2
    assert found.ranks[0].exposed_s is not None


def test_run_without_recorded_operations_still_has_waiting_and_straggler(make: Any) -> None:
    found = profile(load_trial(make(lead_s=0.02)))
    assert not found.operations_recorded
    assert found.bins == ()
    assert found.ranks[0].phases_s["comm_wait"] == pytest.approx(0.02, abs=1e-5)
    assert found.ranks[0].exposed_s is None
    assert found.stragglers[0].straggler == 1
    assert [check.passed for check in found.checks] == [True]


@pytest.mark.parametrize("way", ["SEQUENTIAL", "INTRAOP"])
def test_trial_without_peers_has_no_profile(make: Any, way: str) -> None:
    assert trial_communication(load_trial(make(getattr(fabricate, way)))) is None


def test_operations_outside_steps_do_not_count(make: Any) -> None:
    files = make()
    record = made.two_buckets(files)
    for rank in record.ranks:
        before_s = made.step_rows(record, rank)[0].started_unix_s + rank.clock_offset_s - 1
        made.write(
            files,
            rank.rank,
            made.row(rank, 0, before_s, before_s + 0.1, operation="broadcast", payload_bytes=50),
        )
    assert {b.operation for b in profile(load_trial(files)).bins} == {"allreduce"}


def test_damaged_row_is_an_error_that_names_the_file(make: Any) -> None:
    files = make()
    made.two_buckets(files)
    path = files.rank(1).communication
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(DataError, match=str(path)):
        trial_communication(load_trial(files))


# Counted by hand; the other algorithms: tests/unit/costs. ring: 3 ranks send 4 thirds each. Halving
# among 3: two halves from each of two, and one rank's to and fro.
@pytest.mark.parametrize(
    ("algorithm", "ranks", "messages", "payloads"), [("ring", 3, 12, 4), ("rabenseifner", 3, 6, 4)]
)
def test_what_an_algorithm_is_to_send_stands_beside_what_it_sent(
    make: Any, algorithm: str, ranks: int, messages: int, payloads: int
) -> None:
    files = make(ranks=ranks)
    made.two_buckets(
        files, algorithm=algorithm, ranks=ranks, payload_bytes=1200, sent_bytes=7, sent_messages=3
    )
    (found,) = profile(load_trial(files)).bins
    operations = 2 * MEASURED
    assert found.count == operations * ranks
    assert found.expected_messages == operations * messages
    assert found.expected_bytes == operations * payloads * 1200
    assert found.sent_bytes == 7 * found.count
    assert found.sent_messages == 3 * found.count


def test_json_has_every_number_and_none_where_there_is_none(make: Any) -> None:
    document = jsonable(profile(made.two_buckets(make())))
    assert document["operations_recorded"] is True
    assert len(document["ranks"]) == 2
    each = document["bins"][0]
    assert (each["least_bytes"], each["most_bytes"]) == (10**6, 10**7)
    assert each["sent_bytes"] is None
    assert {c["name"]: c["passed"] for c in document["checks"]}
    assert document["stragglers"][0]["straggler"] == 1
