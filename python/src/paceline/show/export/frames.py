"""A run's rows as flat Polars frames.

A nested value has a column for each of its parts, named with a dot: `speedup.median`,
`cpu_seconds.user`. Frames of trials begin with the columns trial, configuration and repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import polars as pl

from paceline.analysis.trial.evaluation import read_evaluations
from paceline.analysis.trial.host_frames import HostSeries, read_series
from paceline.analysis.trial.operations import clock_errors, load_operations, operation_times
from paceline.analysis.trial.reading import TrialRecord
from paceline.analysis.trial.steps import global_steps, read_steps

_OF_AN_OPERATION = (
    "rank", "step", "group", "operation", "algorithm", "ranks", "sequence", "payload_bytes",
    "sent_bytes", "sent_messages", "asked_s", "turn_s", "ended_s", "time_s", "wait_s",
    "transfer_s", "exposed_s", "overlapped_s", "last_rank",
)  # fmt: skip


def row_frame(rows: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Return the rows of `paceline compare --json` (schema 2) as a frame."""
    flat_rows = [flat(row) for row in rows]
    names = {name for row in flat_rows for name in row}
    # a value that is null in one row and nested in another has columns for its parts only
    parents = {name[:dot] for name in names for dot in range(len(name)) if name[dot] == "."}
    kept = [{name: v for name, v in row.items() if name not in parents} for row in flat_rows]
    return pl.DataFrame(kept, infer_schema_length=None, strict=False)


def step_frame(record: TrialRecord) -> pl.DataFrame:
    """Return the steps of all ranks of a trial, by step and rank; see `analysis.steps`."""
    steps = read_steps(record)
    frames = [
        steps.of_rank(rank).select(
            pl.lit(rank, dtype=pl.Int64).alias("rank"),
            pl.lit(stage, dtype=pl.Int64).alias("stage"),
            pl.all(),
        )
        for rank, stage in zip(steps.ranks, steps.stages.tolist(), strict=True)
    ]
    table = joined(frames)
    return table if table.is_empty() else _of_trial(record, table.sort("step", "rank"))


def evaluation_frame(record: TrialRecord) -> pl.DataFrame:
    """Return the metrics of each evaluation of a trial; see `analysis.evaluation`."""
    found = read_evaluations(record, global_steps(record))
    if found is None:
        return pl.DataFrame()
    names = ("steps", "epoch", "samples", "training_s", "wall_s", "epochs")
    places = {name: getattr(found, name) for name in names}
    table = pl.concat(
        pl.DataFrame({**places, "metric": [name] * len(values), "value": values})
        for name, values in found.metrics.items()
    )
    return _of_trial(record, table)


def communication_frame(record: TrialRecord) -> pl.DataFrame:
    """Return the operations of all ranks of a trial, by rank and turn; see `analysis.operations`.

    asked_s, turn_s and ended_s are unix seconds on rank 0's clock. time_s is wait_s plus
    transfer_s. step is null outside of steps.
    """
    if not record.ranks:
        return pl.DataFrame()
    operations = load_operations(record)
    times = operation_times(read_steps(record), operations, clock_errors(record, operations))
    return _of_trial(record, times.select(_OF_AN_OPERATION))


def host_frame(record: TrialRecord) -> pl.DataFrame:
    """Return the traces of all hosts of a trial with shares and rates; see `host_frames`."""
    return _of_hosts(record, lambda series: series.frame)


def rank_frame(record: TrialRecord) -> pl.DataFrame:
    """Return the traces of all ranks of a trial with their CPU shares."""
    return _of_hosts(record, lambda series: series.ranks)


# The frames of a trial by the names of their files.
TRIAL_FRAMES = {
    "steps": step_frame,
    "evaluations": evaluation_frame,
    "communication": communication_frame,
    "host_trace": host_frame,
    "rank_trace": rank_frame,
}


def joined(frames: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """Put frames below one another; a column that one of them lacks is null there."""
    known = [frame for frame in frames if not frame.is_empty()]
    return pl.concat(known, how="diagonal_relaxed") if known else pl.DataFrame()


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn `{"speedup": {"low": 1.0}}` into `{"speedup.low": 1.0}`; lists are not changed."""
    found: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _of_hosts(record: TrialRecord, part: Callable[[HostSeries], pl.DataFrame]) -> pl.DataFrame:
    frames = [
        _unnested(frame).insert_column(0, pl.lit(series.host).alias("host"))
        for series in read_series(record.files)
        if not (frame := part(series)).is_empty()
    ]
    return _of_trial(record, joined(frames))


def _of_trial(record: TrialRecord, frame: pl.DataFrame) -> pl.DataFrame:
    if frame.is_empty():
        return pl.DataFrame()
    trial = record.trial
    return frame.select(
        pl.lit(trial.id).alias("trial"),
        pl.lit(trial.configuration).alias("configuration"),
        pl.lit(trial.repeat, dtype=pl.Int64).alias("repeat"),
        pl.all(),
    )


def _unnested(frame: pl.DataFrame) -> pl.DataFrame:
    """Replace every struct, also nested ones, by a column for each of its fields."""
    while structs := [n for n, kind in frame.schema.items() if isinstance(kind, pl.Struct)]:
        named = [
            pl.col(name).struct.rename_fields([f"{name}.{f}" for f in frame[name].struct.fields])
            for name in structs
        ]
        frame = frame.with_columns(named).unnest(structs)
    return frame
