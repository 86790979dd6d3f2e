"""The labs of this machine: one file each, in a folder that only root can write."""

from __future__ import annotations

import dataclasses
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import DataError, EnvironmentLacks
from paceline.host.locks import exclusive_lock
from paceline.lab.record import SCHEMA, LabRecord
from paceline.records.files import read_json, typed, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator

# The names of network namespaces in /run/netns hold for the whole machine; so do those of labs.
ROOT = Path("/run/paceline-lab")
_LOCK_S = 60.0


@dataclass(frozen=True, slots=True)
class Registry:
    """Files NAME.json. A process that makes or removes a lab holds the lock."""

    root: Path = ROOT

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other processes that make or remove labs. Raises TimedOut, EnvironmentLacks."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = self.root.stat().st_uid
        if owner != os.geteuid():
            raise EnvironmentLacks(
                f"{self.root}: expected a folder of user {os.geteuid()}, it belongs to {owner}; "
                "find out which program made it, and remove it"
            )
        busy = f"another lab was being made or removed for {_LOCK_S:g} s"
        with exclusive_lock(self.root / "lock", _LOCK_S, busy):
            yield

    def file(self, name: str) -> Path:
        return self.root / f"{name}.json"

    def names(self) -> list[str]:
        return sorted(file.stem for file in self.root.glob("*.json"))

    def load(self, name: str) -> LabRecord | None:
        """Read the record of a lab; None if there is no such lab or its record is unreadable."""
        file = self.file(name)
        try:
            record = typed(read_json(file), LabRecord, file)
        except DataError:
            return None
        return record if record.schema == SCHEMA else None

    def save(self, record: LabRecord) -> None:
        write_json(self.file(record.name), dataclasses.asdict(record))

    def forget(self, name: str) -> None:
        self.file(name).unlink(missing_ok=True)


def is_owned(record: LabRecord) -> bool:
    """Check if the process that will remove the lab is alive."""
    return record.owner is not None and record.owner.is_alive()
