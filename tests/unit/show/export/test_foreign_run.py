"""Reading a run directory of somebody else runs none of its Python."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import save_file
from tests.unit.analysis import fabricate

from paceline.base.errors import PacelineError, UsageError
from paceline.base.host.own_runs import is_own_run, remember_run
from paceline.cli.app import main
from paceline.measure.records.files import read_json
from paceline.show.export import onnx as exporter
from paceline.show.export.run_data import FORMATS, RunData

COMMANDS = [
    ["compare"], ["compare", "--json"], ["compare", "--markdown"], ["explain"],
    ["explain", "--json"], ["report"], ["profile"], ["predict"], ["stacks"],
    *(["export", "--to", name] for name in FORMATS),
]  # fmt: skip


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
        return RunData(run.files.root)

    return plant


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_runs_it(planted: Planted, mark: Path, command: list[str]) -> None:
    root = planted("task.py").files.root
    main([command[0], str(root), *command[1:]])
    assert not mark.exists()


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


def test_records_of_removed_runs_are_removed(tmp_path: Path, state: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        remember_run(tmp_path / name)
        (tmp_path / name).rmdir()
    (tmp_path / "third").mkdir()
    remember_run(tmp_path / "third")
    assert len(list(state.iterdir())) == 1
