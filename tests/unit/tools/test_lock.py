"""python/tools/lock.py, and the lock file against pyproject.toml."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYTHON_DIR = Path(__file__).resolve().parents[3] / "python"


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock", PYTHON_DIR / "tools" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lock"] = module
    spec.loader.exec_module(module)
    return module


def lock_lines() -> list[str]:
    text = (PYTHON_DIR / "requirements.lock").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_the_lock_file_is_what_the_tool_would_write(lock: ModuleType) -> None:
    text = (PYTHON_DIR / "requirements.lock").read_text(encoding="utf-8")
    assert lock.lock_text(text) == text


def test_every_line_of_the_lock_is_one_exact_version_of_any_build() -> None:
    for line in lock_lines():
        [specifier] = Requirement(line).specifier
        assert specifier.operator == "==", line
        assert "+" not in specifier.version, f"{line}: admits one builder's file only"


def test_lock_satisfies_every_range_of_pyproject(lock: ModuleType) -> None:
    document = tomllib.loads((PYTHON_DIR / "pyproject.toml").read_text(encoding="utf-8"))
    project = document["project"]
    wanted = [
        *project["dependencies"],
        *(line for name in lock.LOCKED_EXTRAS for line in project["optional-dependencies"][name]),
        *document["build-system"]["requires"],
        "wheel",
    ]
    pinned = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lock_lines()}
    for requirement in map(Requirement, wanted):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name}: not in the lock; run tools/lock.py"
        assert requirement.specifier.contains(version), f"{requirement}: the lock has {version}"


def test_lock_names_no_index_no_host_and_no_option() -> None:
    text = (PYTHON_DIR / "requirements.lock").read_text(encoding="utf-8")
    assert "://" not in text
    assert not [line for line in lock_lines() if line.startswith("-")]


def test_frozen_environment_becomes_a_lock_without_paceline_pip_and_local_versions(
    lock: ModuleType,
) -> None:
    frozen = (
        "torch==2.13.0+cpu\n# Editable install (paceline==0.1.0)\n-e /somewhere/python\n"
        "pip==23.0.1\npaceline==0.1.0\nJinja2==3.1.6\nast_serialize==0.13.1\n"
    )
    lines = [line for line in lock.lock_text(frozen).splitlines() if not line.startswith("#")]
    assert lines == ["ast_serialize==0.13.1", "Jinja2==3.1.6", "torch==2.13.0"]


def test_only_the_packages_named_may_move(lock: ModuleType) -> None:
    present = "# comment\nJinja2==3.1.6\nmypy_extensions==1.2.0\ntorch==2.13.0\n"
    kept = lock.constraints(present, ["jinja2", "Mypy-Extensions"])
    assert kept.splitlines() == ["torch==2.13.0"]


def test_upgrade_of_a_package_that_is_not_locked_is_refused_by_name(lock: ModuleType) -> None:
    with pytest.raises(SystemExit, match="nosuch"):
        lock.constraints("torch==2.13.0\n", ["nosuch"])
