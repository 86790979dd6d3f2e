"""A trace that Perfetto opens: slices of a thread nest, all ranks are on one clock."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.unit.analysis import fabricate
from tests.unit.analysis import operations as made

from paceline.analysis.trial.reading import load_trial
from paceline.show.export.trace import trace_events, write_trace


@pytest.fixture
def make(tmp_path):
    return partial(fabricate.make_one, tmp_path / "run")


def slices(events: Iterable[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Complete events by process and thread, in order of time, the longer first."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault((event["pid"], event["tid"]), []).append(event)
    for thread in found.values():
        thread.sort(key=lambda e: (e["ts"], -e["dur"]))
    return found


def check_nesting(thread: list[dict[str, Any]]) -> None:
    """Every slice begins after the one before has ended, or ends within it; in whole ns."""
    open_until: list[int] = []
    for event in thread:
        begin = round(1000 * event["ts"])
        end = begin + round(1000 * event["dur"])
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1], event
        open_until.append(end)


@pytest.mark.parametrize(
    "way", ["MPI", "TORCHRUN", "THREADS", "PROCESSES", "PIPELINE", "HYBRID", "SEQUENTIAL"]
)
def test_slices_of_every_thread_nest(make: Any, way: str) -> None:
    files = make(getattr(fabricate, way))
    record = load_trial(files)
    if way in {"MPI", "TORCHRUN"}:
        record = made.two_buckets(files)
    found = slices(trace_events(record))
    assert {pid for pid, _ in found} == {rank.rank for rank in record.ranks}
    for thread in found.values():
        check_nesting(thread)


def test_operations_at_the_same_time_get_threads_of_their_own(make: Any) -> None:
    files = make(backward_s=0.5, lead_s=0.2)  # rank 0's second bucket begins within its first
    events = list(trace_events(made.two_buckets(files)))
    found = slices(events)
    assert [len(found[0, tid]) for tid in (2, 3)] == [24, 24]  # 12 steps, each with its waiting
    assert (1, 3) not in found
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[0, 3] == "communication, 2 at a time"


def test_times_are_microseconds_on_one_clock_from_the_first_event(make: Any) -> None:
    found = slices(trace_events(made.two_buckets(make(lead_s=0.02, clock_offset_s=3.5))))
    assert min(e["ts"] for thread in found.values() for e in thread) == 0
    steps = [[e for e in found[rank, 1] if e["name"].startswith("step")] for rank in (0, 1)]
    for first, second in zip(*steps, strict=True):
        assert first["ts"] == pytest.approx(second["ts"], abs=1)
        assert first["dur"] == pytest.approx(345_000, abs=1)  # MPI's step
    operations = [e for e in found[0, 2] if e["name"] == "allreduce"]
    waiting = [e for e in found[0, 2] if e["name"] == "waiting"]
    assert len(operations) == len(waiting) == 24
    for operation, wait in zip(operations, waiting, strict=True):
        assert wait["ts"] == operation["ts"]
        assert wait["dur"] == pytest.approx(20_000, abs=1)
        assert wait["args"] == {"for rank": 1}


def test_phases_stand_where_they_were(make: Any) -> None:
    found = slices(trace_events(made.two_buckets(make(lead_s=0.02))))
    # rank 1: 10 ms for data, 5 ms beside phases, forward 100, backward 200, transfer 10, step 20
    (_, data, forward, backward, exposed, optimizer) = found[1, 1][:6]
    assert [e["name"] for e in (data, forward, backward, exposed, optimizer)] == [
        "data wait",
        "forward",
        "backward",
        "exposed communication",
        "optimiser",
    ]
    assert forward["ts"] == pytest.approx(10_000, abs=1)
    assert backward["ts"] == pytest.approx(110_000, abs=1)
    assert exposed["ts"] == pytest.approx(310_000, abs=1)
    assert exposed["dur"] == pytest.approx(10_000, abs=1)
    assert optimizer["ts"] == pytest.approx(325_000, abs=1)


def test_communication_of_layers_is_one_slice_between_the_passes(make: Any) -> None:
    phases = slices(trace_events(load_trial(make(lead_s=0.0, pass_comm_s=0.03))))[1, 1][2:6]
    assert [each["name"] for each in phases] == [
        "forward",
        "exposed communication",
        "backward",
        "exposed communication",
    ]
    assert [each["dur"] for each in phases] == pytest.approx([1e5, 3e4, 2e5, 1e4], abs=1)


def test_operation_says_what_it_was(make: Any) -> None:
    events = trace_events(made.two_buckets(make(lead_s=0.02), sent_bytes=7))
    operation = next(e for e in events if e["name"] == "allreduce")
    assert operation["args"] == {
        "bytes": made.FIRST_BYTES,
        "group": "0",
        "sequence": 0,
        "ranks": 2,
        "last to come": 1,
        "waiting ms": pytest.approx(20, abs=1e-3),
        "queued ms": 0,
        "exposed ms": 0,
        "algorithm": "ring",
        "sent bytes": 7,
    }


def test_file_is_one_json_document_with_hosts_in_the_labels(make: Any, tmp_path: Path) -> None:
    out = tmp_path / "new" / "trace.json"
    write_trace(made.two_buckets(make(clock_offset_s=1.0)), out)
    document = json.loads(out.read_text())
    assert document["otherData"]["trial"].startswith("tiny.mpi.mpi")
    events = document["traceEvents"]
    assert all({"name", "ph", "pid", "tid"} <= set(event) for event in events)
    labels = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert labels == {0: "rank 0 (node0)", 1: "rank 1 (node1)"}
    assert [p.name for p in out.parent.iterdir()] == ["trace.json"]


def test_trial_without_operations_has_its_steps(make: Any) -> None:
    assert set(slices(trace_events(load_trial(make())))) == {(0, 1), (1, 1)}
