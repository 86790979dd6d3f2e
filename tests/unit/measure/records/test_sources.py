"""The user's files that a rank has imported, and whether they have changed since."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.measure.records.files import write_json
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.sources import changed_sources, read_sources, write_sources


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A script with a module, and a package of its own, which are imported."""
    folder = tmp_path / "work"
    (folder / "own_package").mkdir(parents=True)
    for name in ("train.py", "own_model.py", "own_package/__init__.py", "own_package/net.py"):
        (folder / name).write_text(f"NAME = {name!r}\n")
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    importlib.import_module("own_model")
    importlib.import_module("own_package.net")
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def files(tmp_path: Path) -> TrialFiles:
    found = TrialFiles(tmp_path / "run" / "trials" / "first")
    for rank in range(2):
        found.rank(rank).root.mkdir(parents=True)
    return found


def training(script: Path | None = None, **values: Any) -> Any:
    own = None if script is None else SimpleNamespace(path=str(script))
    return SimpleNamespace(**{"script": own, "task": "", "task_sha256": None, **values})


def own(found: dict[str, dict[str, str]], folder: Path) -> dict[str, str]:
    """Return path by name of the files below a folder."""
    paths = {name: path for name, versions in found.items() for path in versions.values()}
    return {name: path for name, path in paths.items() if Path(path).is_relative_to(folder)}


def test_script_and_its_imports_are_recorded(work: Path, files: TrialFiles) -> None:
    write_sources(training(work / "train.py"), files.rank(0))
    found = read_sources(files)
    names = ("train.py", "own_model.py", "own_package/__init__.py", "own_package/net.py")
    assert own(found, work) == {name: str(work / name) for name in names}
    assert [hashlib.sha256((work / "train.py").read_bytes()).hexdigest()] == list(found["train.py"])


def test_installed_modules_and_those_of_launchers_are_left_out(
    work: Path, files: TrialFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = ModuleType("torch.compiled")
    launcher = ModuleType("__main__")
    for module in (compiled, launcher):
        module.__file__ = str(work / "own_model.py")
        monkeypatch.setitem(sys.modules, module.__name__, module)
    importlib.import_module("torch")
    write_sources(training(), files.rank(0))
    found = read_sources(files)
    assert set(own(found, work)) == {
        "own_model.py", "own_package/__init__.py", "own_package/net.py",
    }  # fmt: skip
    assert not any(name.startswith(("torch/", "paceline/", "json/")) for name in found)


def test_task_has_the_checksum_with_which_it_was_planned(tmp_path: Path, files: TrialFiles) -> None:
    write_sources(training(task="/users/task.py:Mine", task_sha256="ab" * 32), files.rank(0))
    assert read_sources(files)["task.py"] == {"ab" * 32: "/users/task.py"}


def test_first_checksum_of_a_rank_stays_and_a_change_is_noticed(
    work: Path, files: TrialFiles
) -> None:
    write_sources(training(work / "train.py"), files.rank(0))
    assert changed_sources(files) == set()
    before = read_sources(files)["train.py"]
    (work / "train.py").write_text("NAME = 'changed'\n")
    (work / "own_model.py").unlink()  # whether it is still needed shows when the script runs
    write_sources(training(work / "train.py"), files.rank(0))
    assert read_sources(files)["train.py"] == before
    assert changed_sources(files) == {"train.py"}


def test_versions_of_all_ranks_are_kept(files: TrialFiles) -> None:
    for rank, sha256 in enumerate(("aa", "bb")):
        file = {"path": "/no/such/a.py", "sha256": sha256}
        write_json(files.rank(rank).sources, {"files": {"a.py": file}})
    assert read_sources(files) == {"a.py": {"aa": "/no/such/a.py", "bb": "/no/such/a.py"}}
    assert changed_sources(files) == set()


def test_trial_without_files_of_the_user_has_none(files: TrialFiles) -> None:
    assert read_sources(files) == {}
    assert changed_sources(files) == set()
