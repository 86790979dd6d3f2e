"""No command runs the Python of somebody else's run directory unless the user trusts it, writes
where its links or names lead, or shows its text as commands of a terminal."""

from __future__ import annotations

import hashlib
import shutil
import tomllib
import unicodedata
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from safetensors.numpy import save_file
from tests.support.specs import spec_text
from tests.unit.analysis import fabricate

import paceline
from paceline.base.errors import DataError, ExitCode, PacelineError, UsageError
from paceline.base.host.own_runs import is_own_run, remember_run
from paceline.cli.app import app, main
from paceline.measure.records.files import read_json
from paceline.show.export import onnx as exporter
from paceline.show.export.run_data import FORMATS, RunData, as_csv

# Commands with a run directory, which stands for RUN. Those of ASKING run its Python if trusted.
READING = [
    "compare RUN", "compare RUN --json", "compare RUN --markdown", "compare RUN RUN", "explain RUN",
    "explain RUN --json", "explain RUN RUN", "report RUN", "profile RUN", "predict RUN",
    "stacks RUN", "watch RUN --once", "monitor RUN",
    *(f"export RUN --to {name}" for name in FORMATS if name != "onnx"),
]  # fmt: skip
ASKING = [
    "export RUN --to onnx", "run --resume RUN", "run --resume RUN --repeats 2",
    "run --resume RUN --dry-run", "tune local --resume RUN", "tune comm --resume RUN",
    "predict RUN --measure",
]  # fmt: skip
WITHOUT_A_RUN = {
    "init", "list", "show", "plan", "verify", "data", "doctor", "sidecar", "render",
}  # fmt: skip
SECURITY = Path(__file__).parents[4] / "docs" / "explanation" / "security.md"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(exporter, "require", lambda *_: None)  # as if ONNX were installed
    return tmp_path / "state" / "paceline" / "runs"


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that the code of the run directory creates."""
    return tmp_path / "executed"


Planted = Callable[[str], RunData]


@pytest.fixture
def planted(run: RunData, mark: Path) -> Planted:
    """Give all trials a task whose file is in their folder, with the right checksum."""

    def plant(name: str) -> RunData:
        code = f"open({str(mark)!r}, 'w')\n"
        for _, files in run.files.trials():
            (files.root / name).write_text(code)
            files.weights.parent.mkdir(exist_ok=True)
            if not files.weights.exists():
                save_file({}, files.weights)
            trial = read_json(files.trial)
            training = {**trial["training"], "task": f"{name}:Evil"}
            training["task_sha256"] = hashlib.sha256(code.encode()).hexdigest()
            fabricate.edit_json(files.trial, training=training)
        task = run.files.root / "task.py"
        task.write_text(code)
        workload = f'name = "evil"; task = "{task}:Evil"; max_steps = 4; warmup_steps = 1'
        spec = spec_text(workload=workload)
        fabricate.edit_json(run.files.manifest, spec_toml=spec)
        return RunData(run.files.root)

    return plant


def words(command: str, run: RunData) -> list[str]:
    return [str(run.files.root) if word == "RUN" else word for word in command.split()]


@pytest.mark.parametrize("command", READING)
def test_a_reading_command_runs_nothing(
    planted: Planted, mark: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # monitor finds no Prometheus
    main(words(command, planted("task.py")))
    assert not mark.exists()


@pytest.mark.parametrize("command", ASKING)
def test_a_command_that_would_run_it_asks(
    planted: Planted, mark: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main(words(command, planted("task.py"))) == ExitCode.USAGE
    assert "Read the code, then repeat the command with --trust-run" in capsys.readouterr().err
    assert not mark.exists()


@pytest.mark.parametrize("command", ["run --resume RUN --dry-run", "tune local --resume RUN"])
def test_a_trusted_spec_is_started(planted: Planted, mark: Path, command: str) -> None:
    main([*words(command, planted("task.py")), "--trust-run"])
    assert mark.exists()


def test_from_python_it_must_be_trusted_as_well(planted: Planted, mark: Path) -> None:
    run = planted("task.py")
    spec = read_json(run.files.manifest)["spec_toml"]
    with pytest.raises(UsageError, match="--trust-run"):
        paceline.run(tomllib.loads(spec), run.files.root, resume=True)
    assert not mark.exists()


def test_every_command_is_in_a_test_and_on_the_page() -> None:
    tried = {command.split()[0] for command in [*READING, *ASKING]}
    assert tried | WITHOUT_A_RUN == set(app.commands)
    table = SECURITY.read_text(encoding="utf-8").partition("| command ")[2].partition("\n\n")[0]
    assert not [name for name in app.commands if f"`{name}" not in table]


@pytest.mark.parametrize("name", ["task.py", "paceline.train.workloads.tiny.py"])
def test_onnx_asks_for_trust(planted: Planted, mark: Path, tmp_path: Path, name: str) -> None:
    run = planted(name)
    with pytest.raises(UsageError, match="repeat the command with --trust-run"):
        run.export("onnx", tmp_path / "out")
    assert not mark.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", ["said", "made here"])
def test_a_trusted_run_runs_its_task(
    planted: Planted, mark: Path, tmp_path: Path, way: str
) -> None:
    run = planted("task.py")
    if way == "made here":
        remember_run(run.files.root)
    with pytest.raises(PacelineError, match="Evil"):  # the file has no such class
        run.export("onnx", tmp_path / "out", trust_run=way == "said")
    assert mark.exists()


def test_a_moved_or_replaced_run_is_not_ones_own(tmp_path: Path, state: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    remember_run(mine)
    assert is_own_run(mine)
    assert not is_own_run(other)
    assert state.stat().st_mode & 0o777 == 0o700
    mine.rename(tmp_path / "moved")
    other.rename(mine)
    assert not is_own_run(mine)
    assert not is_own_run(tmp_path / "moved")
    remember_run(mine)
    state.chmod(0o777)  # others could have written the record
    assert not is_own_run(mine)


def test_a_run_is_remembered_while_its_disk_is_not_mounted(tmp_path: Path, state: Path) -> None:
    mine, elsewhere, other = tmp_path / "mine", tmp_path / "elsewhere", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    remember_run(mine)
    mine.rename(elsewhere)
    remember_run(other)
    elsewhere.rename(mine)
    assert is_own_run(mine)


def test_the_oldest_records_are_removed(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.base.host.own_runs._MOST_RECORDS", 2)
    runs = [tmp_path / name for name in ("first", "second", "third")]
    for run in runs:
        run.mkdir()
        remember_run(run)
    assert [is_own_run(run) for run in runs] == [False, True, True]
    assert len(list(state.iterdir())) == 2


ESCAPE = "\x1b]0;title\x07\x1b[2J\x9b31m"


@pytest.mark.parametrize("command", [command for command in READING if "export" not in command])
def test_names_of_a_run_reach_no_terminal_as_commands(
    run: RunData, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for _, files in run.files.trials():
        trial = read_json(files.trial)
        training = {**trial["training"], "model": f"tiny{ESCAPE}"}
        fabricate.edit_json(files.trial, training=training, interface=f"lo{ESCAPE}")
        fabricate.edit_json(files.outcome, message=f"failed {ESCAPE}")
    versions = {f"torch{ESCAPE}": f"2{ESCAPE}"}
    fabricate.edit_json(run.files.manifest, name=f"mine{ESCAPE}", versions=versions)
    main(words(command, run))
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert not [c for c in text if c not in "\t\n" and unicodedata.category(c) == "Cc"]


PLACES = ["export", "export/csv/rows.csv", "export/openmetrics/run.om", "monitor", "trials"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", [*READING, *ASKING])
def test_a_link_of_a_foreign_run_leads_no_command_out(
    run: RunData,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    place: str,
    command: str,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    mine = tmp_path / "mine"
    mine.mkdir()
    link = run.files.root / place
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_dir():
        shutil.copytree(link, mine / "copy")
        shutil.rmtree(link)
    link.symlink_to(mine if "." not in link.name else mine / "new")
    before = sorted(mine.rglob("*"))
    assert main(words(command, run)) == ExitCode.USAGE
    assert "expected a file or folder of the run, got a link" in capsys.readouterr().err
    assert sorted(mine.rglob("*")) == before
    with pytest.raises(DataError, match="got a link"):
        paceline.load(run.files.root)


def test_links_of_ones_own_run_are_followed(run: RunData, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(run.files.root / "trials", elsewhere)
    (run.files.root / "trials").symlink_to(elsewhere)
    remember_run(run.files.root)
    assert main(["compare", str(run.files.root)]) == ExitCode.OK


@pytest.mark.parametrize("kind", ["csv", "parquet", "openmetrics"])
def test_an_export_replaces_a_link_in_its_place(run: RunData, tmp_path: Path, kind: str) -> None:
    """It would otherwise write what the names of the run say into a file of the user."""
    mine, out = tmp_path / "mine", tmp_path / "out"
    run.export(kind, out)
    names = [path.name for path in out.iterdir()]
    mine.write_text("kept")
    for name in names:
        (out / name).unlink()
        for place in (out / name, out / f".{name}"):
            place.symlink_to(mine)
    run.export(kind, out)
    assert mine.read_text() == "kept"
    assert not [name for name in names if (out / name).is_symlink()]


@pytest.mark.parametrize("key", ["id", "experiment"])
@pytest.mark.parametrize("value", ["../../mine", "/etc/mine", "..", "a/b", "", "=1+1", "a\u0000"])
def test_a_name_of_a_foreign_run_is_no_path(run: RunData, key: str, value: str) -> None:
    for _, files in run.files.trials():
        fabricate.edit_json(files.trial, **{key: value})
    for to in ("perfetto", "csv"):
        assert main(["export", str(run.files.root), "--to", to]) == ExitCode.DATA


def test_no_cell_is_a_formula_of_a_spreadsheet() -> None:
    frame = pl.DataFrame({"a": ["=1+1", "@x", "-1", "+1", "1", "a=b", None], "b": [-1] * 7})
    assert as_csv(frame)["a"].to_list() == ["'=1+1", "'@x", "'-1", "'+1", "1", "a=b", None]
    assert as_csv(frame)["b"].to_list() == [-1] * 7
