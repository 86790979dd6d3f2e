"""The last operation that a rank has begun in each group, in a small file that outlives the rank.

The file is mapped into memory, so a note takes no system call, and it is there even if the rank is
killed or holds Python's lock for ever.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from paceline.measure.records.files import content_of

_SLOTS = 32  # groups; later ones are not noted
# group, operation, sequence number, operations that have not ended, begin of the last one
_SLOT = struct.Struct("<64s24sqqd")


@dataclass(frozen=True, slots=True, kw_only=True)
class LastOperation:
    """The operation that a rank began last in a group."""

    group: str
    operation: str
    sequence: int
    pending: int  # operations of the group that have not ended
    begun_unix_s: float


class OperationNotes:
    """Writes the file of one rank."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w+b") as file:
            file.truncate(_SLOTS * _SLOT.size)
            self._memory = mmap.mmap(file.fileno(), _SLOTS * _SLOT.size)
        self._slots: dict[str, int] = {}
        self._pending: dict[str, int] = {}

    def begun(self, group: str, operation: str, sequence: int, unix_s: float) -> None:
        slot = self._slots.setdefault(group, len(self._slots))
        count = self._pending[group] = self._pending.get(group, 0) + 1
        if slot < _SLOTS:
            values = group.encode()[:64], operation.encode()[:24], sequence, count, unix_s
            _SLOT.pack_into(self._memory, slot * _SLOT.size, *values)

    def ended(self, group: str) -> None:
        count = self._pending[group] = self._pending.get(group, 1) - 1
        slot = self._slots.get(group, _SLOTS)
        if slot < _SLOTS:
            begin = slot * _SLOT.size
            name, operation, sequence, _, unix_s = _SLOT.unpack_from(self._memory, begin)
            _SLOT.pack_into(self._memory, begin, name, operation, sequence, count, unix_s)

    def close(self) -> None:
        self._memory.close()


def last_operations(path: Path) -> list[LastOperation]:
    """Return the last operation of each group; empty without a file or if it is cut short."""
    try:
        content = content_of(path)
    except FileNotFoundError:
        return []
    found = []
    for begin in range(0, len(content) - _SLOT.size + 1, _SLOT.size):
        group, operation, sequence, pending, unix_s = _SLOT.unpack_from(content, begin)
        if unix_s:
            found.append(
                LastOperation(
                    group=group.rstrip(b"\0").decode(errors="replace"),
                    operation=operation.rstrip(b"\0").decode(errors="replace"),
                    sequence=sequence,
                    pending=pending,
                    begun_unix_s=unix_s,
                )
            )
    return found
