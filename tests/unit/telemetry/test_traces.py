"""The ends of traces, and rows as they are written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from paceline.records.rows import DiskCounters, GpuSample, HostSample, Pressure
from paceline.telemetry.host import HostReader
from paceline.telemetry.traces import cut_unfinished_row, fields_of, last_row, rows_of_the_end


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


def test_rows_are_written_as_the_dataclasses_say() -> None:
    fields = HostReader().read().fields()
    sample = HostSample(
        **{
            **fields,
            "disks": {"sda": DiskCounters(read_bytes=1, written_bytes=2)},
            "pressure": {"cpu": Pressure(some_s=0.5)},
            "gpus": [GpuSample(name="x", power_watts=3.0)],
        },
        unix_s=1.0,
        run_processes=0,
        run_cpu_seconds=0.0,
        run_cpu_percent=None,
        run_rss_bytes=0,
        run_pss_bytes=None,
        run_threads=0,
        run_voluntary_context_switches=0,
        run_involuntary_context_switches=0,
        sidecar_cpu_seconds=0.0,
        sidecar_rss_bytes=0,
    )
    assert fields_of(sample) == dataclasses.asdict(sample)
