"""Replace the JSON lines of an ended trial by Parquet files, which are smaller and faster to read.

A kill at any moment loses nothing: the Parquet file gets its name only when it is complete and on
disk, and only then the JSON lines are deleted. Readers prefer the Parquet file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from paceline.measure.records.files import sync_folder
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.rows import (
    CommunicationRow,
    EvaluationRow,
    SampleLogRow,
    StepRow,
    UpdateRow,
)
from paceline.measure.records.samples import HOST_SAMPLES, RANK_SAMPLES
from paceline.measure.records.tables import (
    RowFormat,
    parquet_path,
    read_header,
    read_table,
    write_parquet,
)

_ATTEMPTS = 3  # for a file that is still growing


def compact_trial(files: TrialFiles) -> None:
    """Compact all rows of a trial that has ended. Files that are already compact are left alone.

    Raises DataError if a row is damaged; the JSON lines are then kept.
    """
    for path, kind in _row_files(files):
        if path.exists():
            _compact(path, kind)


def _row_files(files: TrialFiles) -> Iterator[tuple[Path, type | RowFormat]]:
    for _, rank in files.ranks():
        yield rank.steps, StepRow
        yield rank.communication, CommunicationRow
        yield rank.sample_log, SampleLogRow
        yield rank.evaluations, EvaluationRow
        yield rank.updates, UpdateRow
    for _, host in files.hosts():
        yield host.trace, HOST_SAMPLES
        yield host.ranks, RANK_SAMPLES


def _compact(path: Path, kind: type | RowFormat) -> None:
    target = parquet_path(path)
    if target.exists():  # a compaction was interrupted before it deleted the JSON lines
        path.unlink()
        return
    temporary = path.with_suffix(".parquet.tmp")
    for _ in range(_ATTEMPTS):
        size = path.stat().st_size
        write_parquet(read_table(path, kind), temporary, read_header(path))
        if path.stat().st_size == size:
            break
    else:
        temporary.unlink()
        return  # it is still growing, for example by the sidecar of another host
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(target)
    sync_folder(path.parent)
    path.unlink()
