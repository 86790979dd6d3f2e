"""The labs of this machine: a file each where root alone may write."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import DataError, EnvironmentLacks, TimedOut
from paceline.host.processes import is_alive, wait_until
from paceline.lab.record import SCHEMA, LabRecord
from paceline.records.files import read_json, write_json
from paceline.records.typed import typed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

# Network namespaces are named in /run/netns, for the whole machine; so are labs.
ROOT = Path("/run/paceline-lab")
_LOCK_S = 60.0


@dataclass(frozen=True, slots=True)
class Registry:
    """Files NAME.json; whoever makes or removes one, or what it stands for, holds the lock."""

    root: Path = ROOT

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else makes or removes labs meanwhile. Raises TimedOut, EnvironmentLacks."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = self.root.stat().st_uid
        if owner != os.geteuid():
            raise EnvironmentLacks(
                f"{self.root}: expected a folder of user {os.geteuid()}, it belongs to {owner}; "
                "see who made it, and remove it"
            )
        with (self.root / "lock").open("w") as lock:
            if not wait_until(lambda: _taken(lock), _LOCK_S):
                raise TimedOut(f"another lab was being made or removed for {_LOCK_S:g} s")
            yield

    def file(self, name: str) -> Path:
        return self.root / f"{name}.json"

    def names(self) -> list[str]:
        return sorted(file.stem for file in self.root.glob("*.json"))

    def load(self, name: str) -> LabRecord | None:
        """None if there is no such lab, or nothing can be read of it but its name."""
        file = self.file(name)
        try:
            record = typed(read_json(file), LabRecord, file)
        except DataError:
            return None
        return record if record.schema == SCHEMA else None

    def save(self, record: LabRecord) -> None:
        write_json(self.file(record.name), record.to_json())

    def forget(self, name: str) -> None:
        self.file(name).unlink(missing_ok=True)


def is_owned(record: LabRecord) -> bool:
    """Whether whoever wants to remove the lab at its end still lives."""
    return record.owner_pid is not None and is_alive(record.owner_pid, record.owner_started_unix_s)


def _taken(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
