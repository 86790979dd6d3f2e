"""Compaction keeps every row, and a kill at any moment loses none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.support.rows import STEP

from paceline.base.errors import DataError
from paceline.measure.records import tables
from paceline.measure.records.files import JsonlWriter
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.rows import SampleLogRow, StepRow
from paceline.measure.records.tables import (
    HOST_SAMPLES,
    parquet_path,
    read_header,
    read_table,
    row_dicts,
    rows,
)

SAMPLE = {
    "unix_s": 2.0,
    "ram_used_bytes": 1,
    "cpu_seconds": {"user": 1.0, "idle": 2.0},
    "pressure": {},
    "disks": {"sda": {"read_bytes": 1, "written_bytes": 2}},
    "core_busy_s": [0.5, 0.25],
    "gpus": [],
}


@pytest.fixture
def files(tmp_path: Path) -> TrialFiles:
    found = TrialFiles(tmp_path / "trial")
    with JsonlWriter(found.rank(0).steps) as out:
        out.write(STEP)
    with JsonlWriter(found.rank(0).sample_log) as out:
        out.write_all(
            [
                SampleLogRow(step=0, epoch=0, sample_ids=[3, 1]),
                {"step": 1, "epoch": 0, "sample_ids": []},
            ]
        )
    return found


def complete(**changes: Any) -> dict[str, Any]:
    """A trace row with every required field."""
    return {**dict.fromkeys(HOST_SAMPLES.required, 0), **SAMPLE, **changes}


def write_trace(files: TrialFiles, *samples: dict[str, Any]) -> Path:
    path = files.host("a").trace
    with JsonlWriter(path) as out:
        out.write_all([{"schema": 2, "interval_s": 0.5}, *samples])
    return path


def test_rows_are_the_same_before_and_after(files: TrialFiles) -> None:
    before = rows(files.rank(0).steps, StepRow), read_table(files.rank(0).sample_log, SampleLogRow)
    tables.compact_trial(files)
    assert not files.rank(0).steps.exists()
    assert parquet_path(files.rank(0).steps).exists()
    assert rows(files.rank(0).steps, StepRow) == before[0] == (STEP,)
    assert read_table(files.rank(0).sample_log, SampleLogRow).equals(before[1])


def test_trace_keeps_its_header_and_the_keys_of_its_dictionaries(files: TrialFiles) -> None:
    path = write_trace(files, complete(), complete(unix_s=2.5, disks={"sdb": {"read_bytes": 7}}))
    tables.compact_trial(files)
    assert read_header(path) == {"schema": 2, "interval_s": 0.5}
    first, second = row_dicts(path)
    assert first["cpu_seconds"] == {"user": 1.0, "idle": 2.0}
    assert first["disks"] == {"sda": {"read_bytes": 1, "written_bytes": 2}}
    assert second["disks"] == {"sdb": {"read_bytes": 7}}
    assert first["core_busy_s"] == [0.5, 0.25]


@pytest.mark.parametrize("killed_in", ["write_parquet", "sync_folder"])
def test_kill_loses_nothing_and_the_next_compaction_completes(
    files: TrialFiles, monkeypatch: pytest.MonkeyPatch, killed_in: str
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(tables, killed_in, die)
        with pytest.raises(Killed):
            tables.compact_trial(files)
    assert rows(files.rank(0).steps, StepRow) == (STEP,)
    tables.compact_trial(files)
    assert rows(files.rank(0).steps, StepRow) == (STEP,)
    assert list(files.root.rglob("*.jsonl")) == []
    assert list(files.root.rglob("*.tmp")) == []


def test_unfinished_row_and_nan_are_read(files: TrialFiles) -> None:
    path = files.rank(0).steps
    row = json.loads(path.read_text())
    path.write_text(json.dumps({**row, "step": 1, "loss_sum": float("nan")}) + '\n{"step": 2, "ep')
    tables.compact_trial(files)
    table = read_table(path, StepRow)
    assert table["step"].to_list() == [1]
    assert table["loss_sum"].is_nan().to_list() == [True]


@pytest.mark.parametrize("row", ['{"step": 1}', "[1]", '{"step": "x"}', "nonsense"])
def test_damaged_row_is_an_error_and_keeps_the_json_lines(files: TrialFiles, row: str) -> None:
    path = files.rank(0).steps
    path.write_text(f"{row}\n{path.read_text()}")
    with pytest.raises(DataError, match=r"steps\.jsonl"):
        tables.compact_trial(files)
    assert path.exists()
    assert not parquet_path(path).exists()


def test_damaged_parquet_file_is_an_error_that_names_it(files: TrialFiles) -> None:
    tables.compact_trial(files)
    parquet_path(files.rank(0).steps).write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"steps\.parquet"):
        read_table(files.rank(0).steps, StepRow)


def test_file_that_still_grows_is_left_alone(
    files: TrialFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files.rank(0).steps
    write = tables.write_parquet

    def append_meanwhile(frame: pl.DataFrame, target: Path, header: dict[str, Any]) -> None:
        write(frame, target, header)
        with JsonlWriter(path) as out:
            out.write(STEP)

    monkeypatch.setattr(tables, "write_parquet", append_meanwhile)
    tables.compact_trial(files)
    assert path.exists()
    assert not parquet_path(path).exists()
    assert list(path.parent.glob("*.tmp")) == []
