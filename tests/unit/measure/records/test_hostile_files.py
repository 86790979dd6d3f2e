"""Files of a run directory that somebody made to harm its reader."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from paceline.base.errors import DataError
from paceline.measure.records.documents import Stopping, only_writer, read_status, read_stopping
from paceline.measure.records.files import content_of, document, read_json, read_jsonl
from paceline.measure.records.layout import RankFiles, RunFiles, TrialFiles
from paceline.measure.records.rows import RankStatus, SpanRow, StepRow
from paceline.measure.records.tables import (
    HOST_SAMPLES,
    read_header,
    read_table,
    rows,
    write_parquet,
)


@pytest.mark.parametrize("content", ["[" * 200_000, '{"a":' * 200_000], ids=["lists", "objects"])
def test_deep_json_is_damage(tmp_path: Path, content: str) -> None:
    (tmp_path / "deep.json").write_text(content)
    with pytest.raises(DataError, match=r"deep\.json: expected"):
        read_json(tmp_path / "deep.json")


def test_the_lock_harms_no_file_that_it_links_to(tmp_path: Path) -> None:
    private, run = tmp_path / "private", RunFiles(tmp_path / "run")
    private.write_text("kept")
    run.root.mkdir()
    run.lock.symlink_to(private)
    with pytest.raises(OSError, match="symbolic links"), only_writer(run):
        pass
    assert private.read_text() == "kept"


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _hollow(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": _pipe,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "itself": lambda path: path.symlink_to(path.name),
    "no content": _hollow,
}
READERS: dict[str, Callable[[Path], object]] = {
    "content_of": content_of,
    "read_json": read_json,
    "read_jsonl": lambda path: list(read_jsonl(path)),
    "document": lambda path: document(path, SpanRow),
    "read_table": lambda path: read_table(path, StepRow),
    "read_status": lambda path: read_status(RankFiles(path.parent)),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_damage(kind: str, reader: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path / "status.json")
    if kind == "itself" and reader == "read_table":
        return  # there is no such file
    with pytest.raises(DataError, match="expected"):
        READERS[reader](tmp_path / "status.json")


@pytest.mark.parametrize(
    "value",
    ["NaN", "Infinity", "-Infinity", "1e308", "-1e308", "1e20", "100000000001", "9" * 30],
)
@pytest.mark.parametrize("name", ["ended_unix_s", "started_unix_s"])
def test_a_time_that_is_none_is_damage(name: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    times = {"started_unix_s": "1.7e9", "ended_unix_s": "1700000001.123456789", name: value}
    fields = ", ".join(f'"{key}": {each}' for key, each in times.items())
    path.write_text(f'{{"name": "imports", {fields}}}\n')
    for read in (
        lambda: document(path, SpanRow),
        lambda: rows(path, SpanRow),
        lambda: read_json(path),
    ):
        with pytest.raises(DataError, match="expected"):
            read()


def test_numbers_that_a_training_may_have_are_read(tmp_path: Path) -> None:
    path = tmp_path / "any.json"
    path.write_text(
        '{"loss": NaN, "worst": -Infinity, "small_s": 5e-324, "digits": 0.12345678901234567, '
        '"bytes": 9223372036854775807, "a_s": -3.5, "text": "\\ud83d\\ude00", "norm": 1e99, '
        '"product_flop_per_s": 1.6e12}'
    )
    assert len(read_json(path)) == 9


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1e101}',
        '{"a": 9223372036854775808}',
        '{"a": "\\ud800"}',
        '{"\\udfff": 1}',
        '{"a": [[-1e300]]}',
    ],
)
def test_values_that_no_table_or_text_has_are_damage(text: str, tmp_path: Path) -> None:
    path = tmp_path / "any.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"any\.json: expected"):
        read_json(path)


STATUS = RankStatus(
    rank=1, host="n", pid=7, process_started_unix_s=1.0, state="failed", start_ticks=1, boot_id="b"
)
FAILURE = {"kind": "DataError", "message": "m", "rank": 1, "host": "n", "unix_s": 1.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": -1}, {"rank": True}, {"rank": 2**40}, {"pid": 0.5}, {"pid": 10**30}, {"pid": -1},
        {"state": "odd"}, {"state": 1}, {"host": None}, {"error": [1]}, {"error": 7},
        {"error": {**FAILURE, "kind": 7}}, {"error": {**FAILURE, "message": None}},
        {"error": {**FAILURE, "unix_s": "x"}}, {"error": {"kind": "x"}}, {"secondary": 1},
    ],
)  # fmt: skip
def test_a_status_that_no_rank_writes_is_damage(changes: dict[str, object], tmp_path: Path) -> None:
    files = RankFiles(tmp_path)
    whole = {**dataclasses.asdict(STATUS), "error": FAILURE}
    files.status.write_text(json.dumps(whole))
    assert read_status(files) is not None
    files.status.write_text(json.dumps({**whole, **changes}))
    with pytest.raises(DataError, match=r"status\.json"):
        read_status(files)


STEP = {
    "step": [0, 1], "epoch": [0, 0], "started_unix_s": [1.0, 2.0], "samples": [1, 1],
    "global_samples": [1, 1], "loss_sum": [1.0, float("inf")], "data_wait_s": [0.0, 0.0],
    "forward_s": [0.1, None], "backward_s": [0.1, 0.1], "comm_s": [None, None],
    "comm_ready_unix_s": [None, None], "optimizer_s": [0.1, 0.1], "other_s": [0.1, 0.1],
    "step_s": [0.4, 0.4],
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"step_s": [0.4, float("nan")]}, {"step_s": [0.4, 1e308]}, {"started_unix_s": [-1.0, 1.0]},
        {"step": ["0", "1"]}, {"step": [None, 1]}, {"forward_s": [[0.1], [0.1]]},
        {"loss_sum": [1e200, 1.0]}, {"samples": [True, False]}, {"epoch": [{"a": 1}, {"a": 2}]},
    ],
)  # fmt: skip
def test_a_parquet_file_with_other_values_is_damage(
    changes: dict[str, list[object]], tmp_path: Path
) -> None:
    path = tmp_path / "steps.jsonl"
    write_parquet(pl.DataFrame(STEP), path.with_suffix(".parquet"), {})
    assert read_table(path, StepRow).height == 2
    write_parquet(pl.DataFrame({**STEP, **changes}), path.with_suffix(".parquet"), {})
    with pytest.raises(DataError, match="expected"):
        read_table(path, StepRow)


SAMPLE: dict[str, object] = {
    **dict.fromkeys(HOST_SAMPLES.required, 1),
    "unix_s": 1.0, "ram_used_bytes": 1, "ram_total_bytes": 2, "swap_used_bytes": 0,
    "disks": {"sda": {"read_bytes": 1}}, "cpu_seconds": {"user": 1.0}, "core_busy_s": [1.0],
    "pressure": {"cpu": {"some_s": 1.0, "full_s": 0.0}}, "gpus": [{"name": "x", "power_watts": 1}],
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"disks": "sda"}, {"disks": {"sda": 1}}, {"disks": {"sda": {"read_bytes": "1"}}},
        {"cpu_seconds": {"user": "1"}}, {"cpu_seconds": {"user": 1e200}},
        {"pressure": {"cpu": {"some_s": 1e300}}}, {"pressure": 1}, {"core_busy_s": [1e20]},
        {"gpus": [{"name": 1}]}, {"gpus": {"name": "x"}},
    ],
)  # fmt: skip
def test_a_sample_with_other_values_is_damage(changes: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(SAMPLE) + "\n")
    assert read_table(path, HOST_SAMPLES).height == 1
    path.write_text(json.dumps({**SAMPLE, **changes}) + "\n")
    with pytest.raises(DataError, match="expected"):
        read_table(path, HOST_SAMPLES)


@pytest.mark.parametrize(
    "header", [{"cores": "2"}, {"interval_s": "1"}, {"boot_id": 1}, {"cores": True}]
)
def test_a_header_with_other_types_is_damage(header: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(json.dumps(header) + "\n")
    with pytest.raises(DataError, match="header: expected"):
        read_header(tmp_path / "trace.jsonl")


def test_a_folder_that_no_rank_writes_is_no_rank(tmp_path: Path) -> None:
    for name in (
        "0",
        "1",
        "00",
        "01",
        "\N{SUPERSCRIPT TWO}",
        "\N{ARABIC-INDIC DIGIT THREE}",
        "-1",
        "x",
    ):
        (tmp_path / "ranks" / name).mkdir(parents=True)
    assert [rank for rank, _ in TrialFiles(tmp_path).ranks()] == [0, 1]


@pytest.mark.parametrize("name", ["a b", "a\nb", "\x1b[31m", "\udcff", "-rf", "a" * 201])
@pytest.mark.parametrize("kind", ["hosts", "trials"])
def test_an_odd_name_of_a_folder_is_damage(kind: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / kind / name
    folder.mkdir(parents=True)
    (folder / "trial.json").touch()
    (tmp_path / kind / ".nfs0").mkdir()  # of the file system
    with pytest.raises(DataError, match="expected folders with names of letters") as raised:
        list(getattr(TrialFiles(tmp_path) if kind == "hosts" else RunFiles(tmp_path), kind)())
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("repeats", [0, -1, 10**12])
def test_a_record_of_looks_without_an_end_is_damage(repeats: int, tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    run.repeats.write_text(
        json.dumps(dataclasses.asdict(Stopping(max_repeats=repeats, tie_margin=0.1)))
    )
    with pytest.raises(DataError, match="expected max_repeats from 1"):
        read_stopping(run)
