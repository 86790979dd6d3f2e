"""Rows in either form: JSON lines while a trial runs, Parquet afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from paceline.measure.records.files import JsonlWriter
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.tables import (
    compact_trial,
    parquet_path,
    read_header,
    row_dicts,
    write_parquet,
)

HOST_ROW = {
    "unix_s": 1.0, "ram_used_bytes": 1, "ram_total_bytes": 2, "swap_used_bytes": 0,
    "run_processes": 1, "run_cpu_seconds": 0.5, "run_rss_bytes": 5, "run_threads": 2,
    "sidecar_cpu_seconds": 0.1, "sidecar_rss_bytes": 7,
}  # fmt: skip
RANK_ROW = {
    "unix_s": 1.0, "rank": 0, "pid": 9, "processes": 1, "cpu_seconds": 0.5, "rss_bytes": 5,
    "threads": 2,
}  # fmt: skip


def test_folder_with_pattern_characters_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a [run] of * mine" / "trace.jsonl"
    path.parent.mkdir()
    write_parquet(pl.DataFrame({"unix_s": [1.0]}), parquet_path(path), {"interval_s": 0.5})
    assert [row["unix_s"] for row in row_dicts(path)] == [1.0]
    assert read_header(path) == {"interval_s": 0.5}


@pytest.mark.parametrize(("name", "row"), [("trace", HOST_ROW), ("ranks", RANK_ROW)])
def test_column_of_a_new_metric_survives_compaction(
    tmp_path: Path, name: str, row: dict[str, Any]
) -> None:
    files = TrialFiles(tmp_path)
    path = getattr(files.host("h"), name)
    with JsonlWriter(path) as writer:
        writer.write_all([{**row, "answer": 42}, {**row, "unix_s": 2.0, "answer": 43}])
    compact_trial(files)
    assert not path.exists()
    assert [found["answer"] for found in row_dicts(path)] == [42, 43]
