"""Export to CSV and Parquet: a file for each frame that is not empty."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from paceline.export.run_data import RunData


def write_csv(run: RunData, out: Path, trial: str | None) -> list[Path]:
    """Write CSV files; lists within a cell are JSON."""
    return _write(run, out, trial, "csv", lambda frame, path: _plain(frame).write_csv(path))


def write_parquet(run: RunData, out: Path, trial: str | None) -> list[Path]:
    """Write Parquet files."""
    return _write(run, out, trial, "parquet", lambda frame, path: frame.write_parquet(path))


def _write(
    run: RunData,
    out: Path,
    trial: str | None,
    suffix: str,
    write: Callable[[pl.DataFrame, Path], object],
) -> list[Path]:
    written = []
    for name, frame in _frames(run, trial):
        if frame.is_empty():
            continue
        path = out / f"{name}.{suffix}"
        temporary = path.with_name(f".{path.name}")  # the file appears complete or not at all
        write(frame, temporary)
        temporary.replace(path)
        written.append(path)
    return written


def _frames(run: RunData, trial: str | None) -> Iterator[tuple[str, pl.DataFrame]]:
    rows = run.to_polars()
    if trial is not None:
        (record,) = run.chosen(trial)
        rows = rows.filter(pl.col("configuration") == record.trial.configuration)
    yield "rows", rows
    yield "steps", run.steps(trial)
    yield "evaluations", run.evaluations(trial)
    yield "communication", run.communication(trial)
    yield "host_trace", run.trace(trial)
    yield "rank_trace", run.rank_trace(trial)


def _plain(frame: pl.DataFrame) -> pl.DataFrame:
    """Replace lists, which CSV does not have, by JSON text."""
    lists = [name for name, kind in frame.schema.items() if isinstance(kind, pl.List)]
    return frame.with_columns(
        pl.Series(name, [None if v is None else json.dumps(v) for v in frame[name].to_list()])
        for name in lists
    )
