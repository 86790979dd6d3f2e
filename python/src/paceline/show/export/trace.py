"""A trial as a trace of Chrome's format, which ui.perfetto.dev and chrome://tracing open.

Each rank is a process. Its thread "steps" has a slice for each step, which contains the step's
phases. The threads "communication" have a slice for each operation, which contains its waiting.
There are several such threads if a transport has several operations at the same time, because
slices of a thread must nest. All times are on rank 0's clock, in microseconds from the first event.

Format: Google's Trace Event Format (https://perfetto.dev/docs/getting-started/other-formats). "X"
are complete events with ts and dur, "M" metadata that name processes and threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from paceline.analysis.trial.reading import RankRecord, TrialRecord
from paceline.measure.records.files import replacing
from paceline.measure.records.phases import LABELS
from paceline.show.export.run_data import RunData, communication_frame, step_frame

_EXPOSED = "exposed communication"
_STEPS, _COMMUNICATION = 1, 2  # thread numbers; further lanes of operations follow


def write_perfetto(run: RunData, out: Path, trial: str | None) -> list[Path]:
    """Write `ID.json` for each trial."""
    records = run.chosen(trial)
    for record in records:
        write_trace(record, out / f"{record.trial.id}.json")
    return [out / f"{record.trial.id}.json" for record in records]


def write_trace(record: TrialRecord, out: Path) -> None:
    """Write the trial's trace, event by event; `out` exists only once it is complete.

    Raises DataError if a file is damaged.
    """
    facts = json.dumps({"trial": record.trial.id, "clock": "rank 0's"})
    with replacing(out) as file:
        file.write(f'{{"displayTimeUnit":"ms","otherData":{facts},"traceEvents":[')
        for number, event in enumerate(trace_events(record)):
            file.write(",\n" if number else "\n")
            json.dump(event, file, separators=(",", ":"))
        file.write("\n]}\n")


def trace_events(record: TrialRecord) -> Iterator[dict[str, Any]]:
    """Yield the events, one rank after the other."""
    steps, operations = step_frame(record), communication_frame(record)
    columns = (steps, "started_s"), (operations, "asked_s")
    times = [float(frame[name].to_numpy().min()) for frame, name in columns if len(frame)]
    began_s = min(times, default=0.0)  # numbers near 0 keep their microseconds in a float
    for rank in record.ranks:
        yield from _names(rank, record.trial.transport)
        ended_s = 0.0
        for row in _of_rank(steps, rank).iter_rows(named=True):
            # unix seconds in a float are exact to a quarter of a microsecond
            started_s = max(ended_s, row["started_s"] - began_s)
            ended_s = started_s + row["step_s"]
            yield from _step(rank.rank, row, started_s, ended_s)
        yield from _operations(rank.rank, _of_rank(operations, rank), began_s)


def _of_rank(frame: pl.DataFrame, rank: RankRecord) -> pl.DataFrame:
    return frame if frame.is_empty() else frame.filter(pl.col("rank") == rank.rank)


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
    """Yield the slices of a step and of its phases."""
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
    """Yield phase, begin and length, in order.

    Rows contain the step's start and end, and when communication began. Other time of a step is
    shown before the forward pass. The passes of a pipeline alternate, and layers communicate many
    times within a pass; here each is one slice.
    """
    comm_s, pass_comm_s, bubble_s, data_wait_s, forward_s, backward_s = (
        row[f"{name}_s"] or 0.0
        for name in ("comm", "pass_comm", "bubble", "data_wait", "forward", "backward")
    )
    optimizing_s = ended_s - row["optimizer_s"]
    ready_s = optimizing_s - comm_s
    averaged_last = False  # weights, after the optimiser, instead of gradients before it
    if row["ready_s"] is not None:
        known_s = started_s + row["ready_s"] - row["started_s"]
        averaged_last = known_s + comm_s > ended_s - row["optimizer_s"] / 2
        optimizing_s = known_s - row["optimizer_s"] if averaged_last else optimizing_s
        ready_s = optimizing_s if averaged_last else known_s
    between_s = bubble_s + pass_comm_s
    at_s = max(started_s + data_wait_s, ready_s - forward_s - between_s - backward_s)
    yield "data_wait", started_s, data_wait_s
    yield "forward", at_s, forward_s
    yield "bubble", at_s + forward_s, bubble_s
    yield _EXPOSED, at_s + forward_s + bubble_s, pass_comm_s
    yield "backward", at_s + forward_s + between_s, backward_s
    if averaged_last:
        yield "optimizer", optimizing_s, row["optimizer_s"]
        yield _EXPOSED, optimizing_s + row["optimizer_s"], comm_s
    else:
        yield _EXPOSED, ready_s, comm_s
        yield "optimizer", optimizing_s, row["optimizer_s"]


def _operations(rank: int, operations: pl.DataFrame, began_s: float) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank's operations, which are in order of their turns."""
    free_s: list[float] = []  # of each lane: when its last slice ends
    for row in operations.iter_rows(named=True):
        turn_s = row["turn_s"] - began_s
        lane = next((n for n, end_s in enumerate(free_s) if end_s <= turn_s), len(free_s))
        if lane == len(free_s):
            free_s.append(0.0)
            if lane:
                name = {"name": f"communication, {lane + 1} at a time"}
                yield _metadata("thread_name", rank, name, _COMMUNICATION + lane)
        end_s = free_s[lane] = turn_s + row["time_s"]
        thread = _COMMUNICATION + lane
        yield _slice(rank, thread, row["operation"], turn_s, end_s, _arguments(row))
        if row["wait_s"]:
            last = {"for rank": row["last_rank"]}
            yield _slice(rank, thread, "waiting", turn_s, min(turn_s + row["wait_s"], end_s), last)


def _arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "bytes": row["payload_bytes"],
        "group": row["group"],
        "sequence": row["sequence"],
        "ranks": row["ranks"],
        "last to come": row["last_rank"],
        "waiting ms": None if row["wait_s"] is None else round(1e3 * row["wait_s"], 4),
        "queued ms": round(1e3 * (row["turn_s"] - row["asked_s"]), 4),
        "exposed ms": round(1e3 * row["exposed_s"], 4),
    }
    optional = {"algorithm": row["algorithm"], "sent bytes": row["sent_bytes"]}
    return found | {name: value for name, value in optional.items() if value is not None}


def _slice(
    rank: int, thread: int, name: str, begin_s: float, end_s: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return a slice. Both ends are rounded, so that slices still touch or nest."""
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
