"""The git commit of a directory, from real repositories."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.host.programs import repository_state

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    return done.stdout.strip()


@needs_git
def test_commit_and_local_changes(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert repository_state(tmp_path) is None, "no commit yet"
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "one")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "untracked").write_text("x")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert repository_state(inner) == {"commit": commit, "has_local_changes": False}
    (tmp_path / "file").write_text("2")
    assert repository_state(inner) == {"commit": commit, "has_local_changes": True}


def test_directory_without_a_repository_has_no_commit(tmp_path: Path) -> None:
    assert repository_state(tmp_path / "no-such-folder") is None


def test_machine_without_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert repository_state(tmp_path) is None
