import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.base.errors import DataError, UsageError
from paceline.measure.records.files import JsonlWriter, read_json, read_jsonl, write_json
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.rows import Outcome, SampleLogRow, SpanRow


def test_rows_come_back_in_order(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    with JsonlWriter(path) as writer:
        writer.write(SampleLogRow(step=0, epoch=0, sample_ids=[3, 1]))
        writer.write({"step": 1})
    assert list(read_jsonl(path)) == [{"step": 0, "epoch": 0, "sample_ids": [3, 1]}, {"step": 1}]


def test_row_keeps_the_rows_within_it(tmp_path):
    span = SpanRow(name="train", started_unix_s=1.0, ended_unix_s=2.5)
    fields = {"name": "train", "started_unix_s": 1.0, "ended_unix_s": 2.5}
    with JsonlWriter(tmp_path / "rows.jsonl") as writer:
        writer.write(span)
        writer.write({"first": {"io": span}, "others": [span]})
    plain, nested = read_jsonl(tmp_path / "rows.jsonl")
    assert plain == fields
    assert nested == {"first": {"io": fields}, "others": [fields]}


@pytest.mark.parametrize("row", [{"path": Path("/")}, {"kind": Outcome}])
def test_row_that_json_cannot_say_is_refused_and_leaves_nothing(tmp_path, row):
    with (
        JsonlWriter(tmp_path / "rows.jsonl") as writer,
        pytest.raises(TypeError, match="expected a dataclass or a JSON value"),
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
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "disk full")))
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


# Writes rows of 60 bytes into a file that the kernel lets grow to 100 bytes: the second row is
# written in part, and only the next call gets the error.
LIMITED = """
import resource, sys
from pathlib import Path
from paceline.measure.records.files import JsonlWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
with JsonlWriter(Path(sys.argv[1])) as writer:
    writer.write({"step": 0, "pad": "x" * 38})
    try:
        writer.write({"step": 1, "pad": "x" * 38})
    except OSError as error:
        print(error.strerror)
"""


def test_row_that_the_kernel_takes_in_part_is_an_error_and_costs_no_other_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, path],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "File too large\n"), done.stderr
    assert path.stat().st_size == 100
    assert [row["step"] for row in read_jsonl(path)] == [0]


class TakesAFewBytes(io.RawIOBase):
    """Writes at most seven bytes a call, as write(2) may."""

    def __init__(self) -> None:
        self.taken = b""

    def write(self, data) -> int:
        self.taken += bytes(data[:7])
        return min(7, len(data))


def test_row_is_written_whole_however_little_each_write_takes(tmp_path, monkeypatch):
    writer = JsonlWriter(tmp_path / "rows.jsonl")
    writer.close()
    partial = TakesAFewBytes()
    monkeypatch.setattr(writer, "_file", partial)
    writer.write_all([{"step": 0}, {"step": 1}])
    assert partial.taken == b'{"step":0}\n{"step":1}\n'


@pytest.mark.parametrize(("umask", "mode"), [(0o077, "0600"), (0o022, "0644"), (0o002, "0664")])
def test_documents_honour_the_umask(tmp_path, umask, mode):
    path = tmp_path / "document.json"
    code = (
        "import sys; from pathlib import Path\n"
        "from paceline.measure.records.files import write_json\n"
        "path = Path(sys.argv[1]); write_json(path, {}); print(oct(path.stat().st_mode)[-4:])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, path], umask=umask, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == mode
