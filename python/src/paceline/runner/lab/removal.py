"""Removal of a lab in any state: its processes, namespaces and files."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from paceline.base.errors import TimedOut
from paceline.base.host.processes import command_line_of, kill_until_gone, pids_with_variable, send
from paceline.collectives.host import wait_until
from paceline.runner.lab import network
from paceline.runner.lab.record import NAME_VARIABLE, LabRecord, Registry, hub_of, namespaces_among

_TERMINATION_S = 3.0
_KILL_S = 10.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where Open MPI keeps segments, shm_overview(7))
FOLDER_PREFIX = "paceline-lab."


def remove(name: str, registry: Registry, *, token: str | None = None) -> bool:
    """Remove everything of the lab; return False if there was nothing.

    token: remove only the lab with this token, not a later lab of the same name.
    Raises TimedOut if its processes cannot be ended.
    """
    with registry.locked():
        record = registry.load(name)
        if token is not None and (record is None or record.token != token):
            return False
        return _remove(name, record, registry)


def remove_abandoned(registry: Registry) -> list[str]:
    """Remove labs whose owner was killed; return their names. The caller holds the lock."""
    found = [name for name in registry.names() if is_abandoned(registry.load(name))]
    for name in found:
        _remove(name, registry.load(name), registry)
    return found


def is_abandoned(record: LabRecord | None) -> bool:
    """Check if no process will remove the lab, because its owner or the machine was stopped."""
    if record is None:
        return True
    if record.owner is not None:
        return not record.owner.is_alive()
    return hub_of(record.name) not in network.namespaces()


def _remove(name: str, record: LabRecord | None, registry: Registry) -> bool:
    spaces = namespaces_among(network.namespaces(), name)
    _end_processes(name, spaces)
    for namespace in spaces:
        network.delete(namespace)
    _end_processes(name, [])  # some may have been about to enter a namespace
    if record is not None:
        _delete_files(record)
    known = registry.file(name).exists()
    registry.forget(name)
    return bool(spaces) or known


def _end_processes(name: str, spaces: list[str]) -> None:
    """Send SIGTERM, so that Spark and MPI clean up, then SIGKILL."""

    def alive() -> set[int]:
        inside = {pid for namespace in spaces for pid in network.processes_in(namespace)}
        return inside | pids_with_variable(NAME_VARIABLE, name)

    asked = alive()
    send(asked, signal.SIGTERM)
    if asked:
        wait_until(lambda: not alive(), _TERMINATION_S, poll_s=0.1)
    if not kill_until_gone(alive, _KILL_S):
        names = {pid: " ".join(command_line_of(pid))[:80] for pid in alive()}
        raise TimedOut(
            f"processes of a lab are alive {_KILL_S:g} s after SIGKILL: {names}; find out what "
            "they wait for (`cat /proc/PID/stack`), then repeat the command"
        )


def _delete_files(record: LabRecord) -> None:
    folder = Path(record.folder)
    if folder.name == f"{FOLDER_PREFIX}{record.name}" and folder.is_dir():
        shutil.rmtree(folder)
    for segment in segments(record):
        segment.unlink(missing_ok=True)


def segments(record: LabRecord) -> list[Path]:
    """List shared memory of killed ranks; Open MPI names it sm_segment.HOST.UID.JOB.RANK."""
    return [file for host in record.hosts for file in _SHARED_MEMORY.glob(f"*.{host.name}.*")]
