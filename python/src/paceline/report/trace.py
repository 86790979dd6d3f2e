"""A trial as a trace of Chrome's format, which ui.perfetto.dev and chrome://tracing open.

One process a rank. Its thread "steps" has a slice for each step with the step's phases within; the
threads "communication" have a slice for each operation with its waiting within. More than one of
those, where a transport carries several operations at the same time: slices of a thread must nest.
All times are on rank 0's clock, in microseconds from the first thing that happened.

Format: Google's Trace Event Format (https://perfetto.dev/docs/getting-started/other-formats). "X"
are complete events with ts and dur, "M" metadata that name processes and threads.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from paceline.analysis.communication_rows import load_operations
from paceline.analysis.communication_times import clock_errors, operation_times
from paceline.analysis.steps import read_steps
from paceline.errors import UsageError
from paceline.records.phases import LABELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from paceline.analysis.communication_rows import Operations
    from paceline.analysis.communication_times import OperationTimes
    from paceline.analysis.reading import RankRecord, TrialRecord

_EXPOSED = "exposed communication"
_STEPS, _COMMUNICATION = 1, 2  # thread numbers; further lanes of operations follow


def write_trace(record: TrialRecord, out: Path) -> None:
    """Write the trial's trace, event by event; `out` is there only once it is whole.

    Raises DataError if a file is damaged, UsageError if `out` cannot be written.
    """
    try:
        _write(record, out)
    except OSError as error:
        raise UsageError(f"{out}: cannot write the trace: {error}") from error


def trace_events(record: TrialRecord) -> Iterator[dict[str, Any]]:
    """The events, one rank after the other."""
    operations = load_operations(record)
    steps = read_steps(record)
    times = None
    if operations is not None and len(operations):
        times = operation_times(steps, operations, clock_errors(record, operations))
    began_s = _began(steps, operations)
    for rank in record.ranks:
        yield from _names(rank, record.trial.transport)
        ended_s = 0.0
        for row in steps.filter(pl.col("rank") == rank.rank).iter_rows(named=True):
            # unix seconds in a float are exact to a quarter of a microsecond
            started_s = max(ended_s, row["started_s"] - began_s)
            ended_s = started_s + row["step_s"]
            yield from _step(rank.rank, row, started_s, ended_s)
        if operations is not None and times is not None:
            yield from _operations(rank.rank, operations, times, began_s)


def _write(record: TrialRecord, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            facts = {"trial": record.trial.id, "clock": "rank 0's"}
            file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(facts)}')
            file.write(',"traceEvents":[')
            for number, event in enumerate(trace_events(record)):
                file.write(",\n" if number else "\n")
                json.dump(event, file, separators=(",", ":"))
            file.write("\n]}\n")
        Path(temporary).chmod(0o644)
        Path(temporary).replace(out)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _began(steps: pl.DataFrame, operations: Operations | None) -> float:
    """Return the earliest time: numbers near 0 keep their microseconds in a float."""
    started = steps["started_s"].to_numpy()
    asked = operations.asked_s if operations is not None else np.zeros(0)
    return min((float(found.min()) for found in (started, asked) if len(found)), default=0.0)


def _names(rank: RankRecord, transport: str) -> Iterator[dict[str, Any]]:
    host = "" if rank.host is None else f" ({rank.host})"
    yield _metadata("process_name", rank.rank, {"name": f"rank {rank.rank}{host}"})
    yield _metadata("process_sort_index", rank.rank, {"sort_index": rank.rank})
    yield _metadata("thread_name", rank.rank, {"name": "steps"}, _STEPS)
    name = f"communication ({transport})"
    yield _metadata("thread_name", rank.rank, {"name": name}, _COMMUNICATION)


def _step(
    rank: int, row: Mapping[str, Any], started_s: float, ended_s: float
) -> Iterator[dict[str, Any]]:
    """The step and its phases, each where it was as far as the row says."""
    arguments = {"epoch": row["epoch"], "samples": row["samples"], "loss_sum": row["loss_sum"]}
    yield _slice(rank, _STEPS, f"step {row['step']}", started_s, ended_s, arguments)
    free_s = started_s
    for name, at_s, length_s in _places(row, started_s, ended_s):
        begin_s, end_s = max(at_s, free_s), min(at_s + length_s, ended_s)
        if length_s > 0 and end_s > begin_s:
            yield _slice(rank, _STEPS, LABELS.get(name, name), begin_s, end_s, {})
            free_s = end_s


def _places(
    row: Mapping[str, Any], started_s: float, ended_s: float
) -> Iterator[tuple[str, float, float]]:
    """Phase, begin and length, in order.

    Known are the step's start and end, and when communication began. What a step does beside its
    phases lies before the forward pass; a pipeline's passes alternate, here they are in a row.
    """
    comm_s, bubble_s = row["comm_s"] or 0.0, row["bubble_s"] or 0.0
    optimizing_s = ended_s - row["optimizer_s"]
    ready_s = optimizing_s - comm_s
    averaged_last = False  # weights, after the optimiser, instead of gradients before it
    if row["ready_s"] is not None:
        known_s = started_s + row["ready_s"] - row["started_s"]
        averaged_last = known_s + comm_s > ended_s - row["optimizer_s"] / 2
        optimizing_s = known_s - row["optimizer_s"] if averaged_last else optimizing_s
        ready_s = optimizing_s if averaged_last else known_s
    at_s = max(
        started_s + row["data_wait_s"], ready_s - row["forward_s"] - row["backward_s"] - bubble_s
    )
    yield "data_wait", started_s, row["data_wait_s"]
    yield "forward", at_s, row["forward_s"]
    yield "bubble", at_s + row["forward_s"], bubble_s
    yield "backward", at_s + row["forward_s"] + bubble_s, row["backward_s"]
    if averaged_last:
        yield "optimizer", optimizing_s, row["optimizer_s"]
        yield _EXPOSED, optimizing_s + row["optimizer_s"], comm_s
    else:
        yield _EXPOSED, ready_s, comm_s
        yield "optimizer", optimizing_s, row["optimizer_s"]


def _operations(
    rank: int, operations: Operations, times: OperationTimes, began_s: float
) -> Iterator[dict[str, Any]]:
    free_s: list[float] = []  # of each lane: when its last slice ends
    for row in np.flatnonzero(operations.rank == rank).tolist():
        turn_s = float(operations.turn_s[row]) - began_s
        time_s, wait_s = float(times.time_s[row]), float(times.wait_s[row])
        lane = next((n for n, end_s in enumerate(free_s) if end_s <= turn_s), len(free_s))
        if lane == len(free_s):
            free_s.append(0.0)
            if lane:
                name = {"name": f"communication, {lane + 1} at a time"}
                yield _metadata("thread_name", rank, name, _COMMUNICATION + lane)
        end_s = free_s[lane] = turn_s + time_s
        thread = _COMMUNICATION + lane
        name = operations.operations[operations.operation[row]]
        yield _slice(rank, thread, name, turn_s, end_s, _arguments(operations, times, row))
        if wait_s > 0:
            last = {"for rank": int(times.last_rank[row])}
            yield _slice(rank, thread, "waiting", turn_s, min(turn_s + wait_s, end_s), last)


def _arguments(operations: Operations, times: OperationTimes, row: int) -> dict[str, Any]:
    wait_s = float(times.wait_s[row])
    found: dict[str, Any] = {
        "bytes": int(operations.payload_bytes[row]),
        "group": operations.groups[operations.group[row]],
        "sequence": int(operations.sequence[row]),
        "ranks": int(operations.ranks[row]),
        "last to come": int(times.last_rank[row]),
        "waiting ms": None if np.isnan(wait_s) else round(1e3 * wait_s, 4),
        "queued ms": round(1e3 * float(operations.turn_s[row] - operations.asked_s[row]), 4),
        "exposed ms": round(1e3 * float(times.exposed_s[row]), 4),
    }
    algorithm = operations.algorithms[operations.algorithm[row]]
    if algorithm:
        found["algorithm"] = algorithm
    if not np.isnan(operations.sent_bytes[row]):
        found["sent bytes"] = int(operations.sent_bytes[row])
    return found


def _slice(
    rank: int, thread: int, name: str, begin_s: float, end_s: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Both ends are rounded alike, so that slices which touch or nest still do."""
    begin_ns, end_ns = round(1e9 * begin_s), round(1e9 * end_s)
    event = {
        "name": name,
        "ph": "X",
        "ts": begin_ns / 1e3,
        "dur": (end_ns - begin_ns) / 1e3,
        "pid": rank,
        "tid": thread,
    }
    return {**event, "args": arguments} if arguments else event


def _metadata(name: str, rank: int, arguments: dict[str, Any], thread: int = 0) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": arguments}
