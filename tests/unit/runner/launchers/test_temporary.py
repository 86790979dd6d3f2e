"""Folders for a launcher's temporary files: there during the trial, gone whatever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.running import running

from paceline.base.host import cleaner, locks
from paceline.base.host.processes import TOKEN_VARIABLE, is_alive, parent_of
from paceline.collectives.host import wait_until
from paceline.runner.launchers.supervise import temporary_folders

LIMIT_S = 15.0
# Holds folders with a file until it is killed.
OWNER = """
import sys, time
from paceline.runner.launchers.supervise import temporary_folders
with temporary_folders(sys.argv[1]) as folders:
    (folders.disk / "file").touch()
    print(folders.disk, folders.memory, sep="\\n", flush=True)
    time.sleep(300)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(300)
"""


@pytest.fixture
def token() -> str:
    return f"test{os.getpid()}.{os.urandom(4).hex()}"


@pytest.fixture
def stubborn(token: str) -> Iterator[subprocess.Popen[str]]:
    """A process of the trial that does not end when it is asked to."""
    with running(STUBBORN, **{TOKEN_VARIABLE: token}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


def children() -> set[int]:
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {pid for pid in pids if parent_of(pid) == os.getpid()}


def test_folders_and_their_cleaner_are_there_only_in_the_block(token: str) -> None:
    before = children()
    with temporary_folders(token) as folders:
        (folders.disk / "folder").mkdir()
        (folders.memory / "file").touch()
        assert folders.memory.parent.as_posix() == "/dev/shm"
        assert len(children() - before) == 1
        assert folders.disk.stat().st_mode & 0o077 == 0, "files are the user's own"
    assert not folders.disk.exists()
    assert not folders.memory.exists()
    assert children() == before


def test_folders_of_a_killed_owner_are_removed(token: str) -> None:
    with running(OWNER, token) as owner:
        assert owner.stdout is not None
        folders = [Path(owner.stdout.readline().strip()) for _ in range(2)]
        assert all(folder.is_dir() for folder in folders)
    assert wait_until(lambda: not any(folder.exists() for folder in folders), LIMIT_S)


def test_folders_of_which_all_processes_were_killed_are_removed_by_a_later_trial(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(OWNER, token) as owner:
        assert owner.stdout is not None
        folders = [Path(owner.stdout.readline().strip()) for _ in range(2)]
        for pid in (p for p in map(int, _pids()) if parent_of(p) == owner.pid):
            os.kill(pid, signal.SIGKILL)  # the cleaner
    assert all(folder.is_dir() for folder in folders)
    monkeypatch.setattr(locks, "_NEW_S", -1.0)
    with temporary_folders(token):
        assert not any(folder.exists() for folder in folders)


def _pids() -> list[str]:
    return [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def test_process_that_does_not_end_is_killed(
    token: str, stubborn: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaner, "GRACE_S", 0.3)
    cleaner.end_marked(f"{TOKEN_VARIABLE}=another".encode())
    assert is_alive(stubborn.pid)
    cleaner.end_marked(f"{TOKEN_VARIABLE}={token}".encode())
    assert stubborn.wait(timeout=LIMIT_S) == -signal.SIGKILL
