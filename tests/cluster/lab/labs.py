"""Labs for tests, with the check that nothing is left of them afterwards."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.base.host.processes import command_line_of, pids_with_variable
from paceline.collectives.host import wait_until
from paceline.runner.lab import Lab, LabSettings, network
from paceline.runner.lab.record import (
    NAME_VARIABLE,
    ROOT,
    Host,
    LabRecord,
    Registry,
    namespaces_among,
)

_LOCK_S = 120.0


@contextmanager
def checked_lab(settings: LabSettings, logs: Path | None = None) -> Iterator[Lab]:
    """Make a lab, and check at the end that it left nothing.

    Tests that use it carry `@pytest.mark.needs("lab")`.
    """
    lab = Lab(settings, logs=logs)
    with removing_remains():
        lab.make()
    try:
        yield lab
    finally:
        lab.close()
    assert traces_of(lab.record) == []


@contextmanager
def removing_remains() -> Iterator[None]:
    """Wait for `keeping_remains` in other test processes.

    A new lab, and `paceline lab down`, remove what is left of killed labs.
    """
    with _locked(fcntl.LOCK_SH):
        yield


@contextmanager
def keeping_remains() -> Iterator[None]:
    """Keep all test processes from removing what is left of a killed lab, for a look at it."""
    with _locked(fcntl.LOCK_EX):
        yield


def hide(folder: Path, host: Host) -> None:
    """Let processes that start on the host after this see nothing in a folder that exists."""
    text, before = host.entrance.read_text("utf-8"), "sh -c 'hostname"
    assert before in text
    # Each command on a host has mounts of its own (ip-netns(8)).
    after = f"sh -c 'mount -t tmpfs none {folder} && hostname"
    host.entrance.write_text(text.replace(before, after), "utf-8")


def traces_of(record: LabRecord) -> list[str]:
    """List everything of a lab on this machine: namespaces, files, processes of any user."""
    processes = [
        f"process {pid} ({' '.join(command_line_of(pid))[:80]})"
        for pid in sorted(pids_with_variable(NAME_VARIABLE, record.name))
    ]
    files = (Path(record.folder), Registry().file(record.name), *network.segments(record))
    return [
        *namespaces_among(network.namespaces(), record.name),
        *(str(file) for file in files if file.exists()),
        *processes,
    ]


@contextmanager
def _locked(operation: int) -> Iterator[None]:
    ROOT.mkdir(mode=0o700, exist_ok=True)
    with (ROOT / "tests.lock").open("w") as lock:

        def taken() -> bool:
            try:
                fcntl.flock(lock, operation | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        assert wait_until(taken, _LOCK_S, poll_s=0.1), f"another test holds {lock.name}"
        yield
