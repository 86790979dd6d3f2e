"""No command runs the Python of somebody else's run directory unless the user trusts it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tomllib
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import save_file
from tests.support.specs import spec_text
from tests.unit.analysis import fabricate

import paceline
from paceline.base.errors import ExitCode, PacelineError, UsageError
from paceline.base.host.own_runs import is_own_run, remember_run
from paceline.cli.app import app, main
from paceline.measure.records.files import read_json
from paceline.show.export import onnx as exporter
from paceline.show.export.run_data import FORMATS, RunData

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
        training = {**trial["training"], "workload": f"tiny{ESCAPE}"}
        fabricate.edit_json(files.trial, training=training, experiment=f"mine{ESCAPE}")
        fabricate.edit_json(files.outcome, message=f"failed {ESCAPE}")
    fabricate.edit_json(run.files.manifest, experiment=f"mine{ESCAPE}")
    main(words(command, run))
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert not [c for c in text if c not in "\t\n" and unicodedata.category(c) == "Cc"]


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _link(target: str) -> Callable[[Path], None]:
    def put(file: Path) -> None:
        file.unlink()
        file.symlink_to(target)

    return put


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


_VALUE = r'(?<=[:,\[ ])(-?\d[\d.e+-]*|"[^"]*"(?!:))'


def _other_values(value: str) -> Callable[[Path], None]:
    """Return what replaces every number and every text of a file."""

    def put(file: Path) -> None:
        file.write_text(
            re.sub(r'(?<=[:,\[ ])(-?\d[\d.e+-]*|"[^"]*"(?!:))', value, file.read_text())
        )

    return put


# What stands in place of a file of the run directory.
HOSTILE: dict[str, Callable[[Path], object]] = {
    "nothing": Path.unlink,
    "empty": lambda file: file.write_text(""),
    "null": lambda file: file.write_text("null"),
    "a list": lambda file: file.write_text("[]"),
    "no text": lambda file: file.write_bytes(b"\xff\xfe\x00" * 99),
    "cut off": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "deep": lambda file: file.write_text("[" * 200_000),
    "a long number": lambda file: file.write_text("9" * 5_001),
    "1e308": _other_values("1e308"),
    "-1": _other_values("-1"),
    "NaN": _other_values("NaN"),
    "a long integer": _other_values("9" * 30),
    "a path": _other_values('"../../../etc/passwd"'),
    "NUL": _other_values(r'"\\u0000"'),
    "a pipe": _fifo,
    "a device": _link("/dev/zero"),
    "itself": _link("."),
    "a folder": _folder,
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_every_command_ends_in_order_whatever_a_file_is(
    hostile: str, run: RunData, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each command meets each kind of damage, in a file that differs from command to command."""
    monkeypatch.setenv("PATH", "/nowhere")
    root = run.files.root
    files = sorted(p.relative_to(root) for p in root.rglob("*.json*") if p.is_file())
    for number, command in enumerate([*READING, *ASKING]):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(root, copy)
        HOSTILE[hostile](copy / files[(number * 7 + len(hostile)) % len(files)])
        code = main([str(copy) if word == "RUN" else word for word in command.split()])
        assert code in set(ExitCode), command
