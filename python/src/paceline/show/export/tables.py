"""Export to CSV and Parquet: a file for each frame that is not empty."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl

from paceline.show.export.frames import TRIAL_FRAMES
from paceline.show.export.run_data import RunData


def write_csv(run: RunData, out: Path, trial: str | None) -> list[Path]:
    """Write a CSV file for each frame that is not empty; lists within a cell are JSON."""
    return [_written(out / f"{n}.csv", _plain(f).write_csv) for n, f in _frames(run, trial)]


def write_parquet(run: RunData, out: Path, trial: str | None) -> list[Path]:
    """Write a Parquet file for each frame that is not empty."""
    return [_written(out / f"{n}.parquet", f.write_parquet) for n, f in _frames(run, trial)]


def _frames(run: RunData, trial: str | None) -> Iterator[tuple[str, pl.DataFrame]]:
    rows = run.to_polars()
    if trial is not None:
        (record,) = run.chosen(trial)
        rows = rows.filter(pl.col("configuration") == record.trial.configuration)
    found = {"rows": rows, **{name: run.frame(name, trial) for name in TRIAL_FRAMES}}
    yield from ((name, frame) for name, frame in found.items() if not frame.is_empty())


def _written(path: Path, write: Callable[[Path], object]) -> Path:
    temporary = path.with_name(f".{path.name}")  # the file appears complete or not at all
    write(temporary)
    return temporary.replace(path)


def _plain(frame: pl.DataFrame) -> pl.DataFrame:
    """Replace lists, which CSV does not have, by JSON text."""
    lists = [name for name, kind in frame.schema.items() if isinstance(kind, pl.List)]
    return frame.with_columns(
        pl.Series(name, [None if v is None else json.dumps(v) for v in frame[name].to_list()])
        for name in lists
    )
