import json
from pathlib import Path

import pytest

from paceline.errors import DataError, UsageError
from paceline.records.files import JsonlWriter, read_json, read_jsonl, write_json
from paceline.records.layout import RunFiles
from paceline.records.rows import CgroupSample, GpuSample, Pressure, SampleLogRow


def test_rows_come_back_in_order(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    with JsonlWriter(path) as writer:
        writer.write(SampleLogRow(step=0, epoch=0, sample_ids=[3, 1]))
        writer.write({"step": 1})
    assert list(read_jsonl(path)) == [{"step": 0, "epoch": 0, "sample_ids": [3, 1]}, {"step": 1}]


def test_row_keeps_the_rows_within_it(tmp_path):
    with JsonlWriter(tmp_path / "rows.jsonl") as writer:
        writer.write(CgroupSample(cpu_s=1.5))
        writer.write({"pressure": {"io": Pressure(some_s=2.0)}, "gpus": [GpuSample(name="A")]})
    plain, nested = read_jsonl(tmp_path / "rows.jsonl")
    assert plain == {
        "cpu_limit_cores": None,
        "cpu_s": 1.5,
        "throttled_s": None,
        "throttled_periods": None,
        "memory_limit_bytes": None,
        "memory_used_bytes": None,
    }
    assert nested["pressure"] == {"io": {"some_s": 2.0, "full_s": None}}
    assert nested["gpus"][0]["name"] == "A"


@pytest.mark.parametrize("row", [{"path": Path("/")}, {"kind": Pressure}])
def test_row_that_json_cannot_say_is_refused_and_leaves_nothing(tmp_path, row):
    with (
        JsonlWriter(tmp_path / "rows.jsonl") as writer,
        pytest.raises(TypeError, match="expected a dataclass or what JSON knows"),
    ):
        writer.write(row)
    assert (tmp_path / "rows.jsonl").read_bytes() == b""


def test_second_writer_appends(tmp_path):
    path = tmp_path / "rows.jsonl"
    for step in range(2):
        with JsonlWriter(path) as writer:
            writer.write({"step": step})
    assert [row["step"] for row in read_jsonl(path)] == [0, 1]


def test_row_cut_at_any_byte_loses_only_itself(tmp_path):
    whole = b'{"step":0}\n{"step":1}\n'
    path = tmp_path / "rows.jsonl"
    for cut in range(len(b'{"step":0}\n'), len(whole)):
        path.write_bytes(whole[:cut])
        assert list(read_jsonl(path)) == [{"step": 0}]


@pytest.mark.parametrize("text", ["{not json}\n", "[1]\n"])
def test_damaged_row_is_named(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step":0}\n' + text)
    with pytest.raises(DataError, match=r"rows\.jsonl:2"):
        list(read_jsonl(path))


def test_document_is_replaced_whole_and_leaves_no_temporary(tmp_path):
    path = tmp_path / "doc.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert read_json(path) == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["doc.json"]


def test_failed_write_keeps_the_old_document(tmp_path, monkeypatch):
    path = tmp_path / "doc.json"
    write_json(path, {"a": 1})
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["doc.json"]


@pytest.mark.parametrize("text", [None, "nonsense", "[1]"])
def test_missing_or_wrong_document_is_data_error(tmp_path, text):
    path = tmp_path / "doc.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=r"doc\.json"):
        read_json(path)


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "a b"])
def test_names_cannot_leave_the_run_directory(tmp_path, name):
    with pytest.raises(UsageError):
        RunFiles(tmp_path).trial(name)


def test_trials_and_ranks_are_found_in_order(tmp_path):
    run = RunFiles(tmp_path)
    for name in ("b", "a"):
        write_json(run.trial(name).trial, {})
    for rank in (10, 2):
        run.trial("a").rank(rank).root.mkdir(parents=True)
    assert [name for name, _ in run.trials()] == ["a", "b"]
    assert [rank for rank, _ in run.trial("a").ranks()] == [2, 10]
