"""The ends of traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.telemetry.traces import cut_unfinished_row, last_row, rows_of_the_end


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (b"", b""),
        (b"{}\n", b"{}\n"),
        (b"{}\n{", b"{}\n"),
        (b"torn", b""),
        (b"{}\n" + b"x" * 10000, b"{}\n"),
        (b"x" * 4095 + b"\n" + b"y" * 4096, b"x" * 4095 + b"\n"),
    ],
)
def test_only_an_unfinished_last_row_is_cut(tmp_path: Path, content: bytes, left: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    cut_unfinished_row(path)
    assert path.read_bytes() == left


def test_no_file_has_nothing_to_cut(tmp_path: Path) -> None:
    cut_unfinished_row(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


def test_last_row_is_found_behind_gaps_and_torn_rows(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\nnoise\n[3]\n{"gap": 1}\n{"a": 4')
    assert last_row(path, "a") == {"a": 2}
    assert last_row(path, "b") is None
    assert last_row(tmp_path / "none", "a") is None


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"number": number, "filler": "x" * 1000} for number in range(1000)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [row["number"] for row in rows_of_the_end(path)]
    assert 200 < len(found) < 300
    assert found == list(range(1000 - len(found), 1000))
