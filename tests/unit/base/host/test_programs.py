"""Programs in use: first candidate, version, and the job scripts."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from tests.support.documentation import ROOT
from tests.support.fake_programs import program

from paceline.base.errors import EnvironmentLacks
from paceline.base.host import programs
from paceline.base.host.programs import repository_state


def test_an_extra_is_installed_by_the_names_of_its_packages():
    project = tomllib.loads((ROOT / "python/pyproject.toml").read_text("utf-8"))["project"]
    wanted = project["optional-dependencies"]["mpi"]
    words = shlex.split(programs.how_to_install("mpi"))
    assert words == ["pip", "install", *(each.partition(";")[0] for each in wanted)]


def test_an_extra_without_an_installed_paceline_is_that_of_a_clone(monkeypatch):
    def requires(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert programs.how_to_install.__wrapped__("mpi") == "pip install './python[mpi]'"


def test_finding_about_a_missing_program_says_how_to_get_it():
    def find():
        raise EnvironmentLacks("pip install it")

    finding = programs.tool_finding("It", find)
    assert (finding.ok, finding.found, finding.why) == (False, "missing", "pip install it")


def test_finding_about_a_program_says_where_it_is():
    tool = programs.Tool(path=Path("/opt/it"), version="1.2", why="PATH")
    finding = programs.tool_finding("It", lambda: tool)
    assert (finding.ok, finding.found, finding.why) == (True, "1.2", "PATH: /opt/it")


KILLED = "a person, a scheduler, or the kernel for lack of memory"


@pytest.mark.parametrize(
    ("status", "errors", "reason"),
    [
        (1, "Traceback\nKeyError: 'a'\n", "KeyError: 'a'"),
        (
            1,
            "Exception in x: no file\n\tat a.B.c(B.java:1)\n\t... 2 more\n",
            "Exception in x: no file",
        ),
        (1, "", "no message"),
        (
            -9,
            "",
            f"was killed by SIGKILL (signal 9): by {KILLED}; no message",
        ),
        (-35, "a\nb\n", "was ended by signal 35; b"),
    ],
)
def test_reason_of_a_failure_is_the_last_line_and_the_signal(status, errors, reason):
    ended = subprocess.CompletedProcess(["it"], status, stdout="", stderr=errors)
    assert programs.why_it_failed(ended) == reason


def test_job_script_is_found_in_the_directory_that_is_named(tmp_path):
    script = program(tmp_path / "mpi-jobs" / "train.py", "")
    assert programs.job_script("mpi-jobs", "train.py", {"PACELINE_JOBS": str(tmp_path)}) == script


def test_job_script_that_is_nowhere_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(EnvironmentLacks, match="PACELINE_JOBS"):
        programs.job_script("mpi-jobs", "none.py", {"PACELINE_JOBS": str(tmp_path)})


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
