"""Lines that are added to a file, as they come."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_CHUNK_BYTES = 1 << 20


class LineTail:
    """Reads on where it stopped; a line without its end is left for the next time.

    First look (`was_replaced`), then read: a file that has not grown is not opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = str(path)
        self._offset = self._size = 0
        self._equivalence: tuple[int, int] | None = None  # of the file that was read so far

    def was_replaced(self) -> bool:
        """Look at the file: whether what was read is no longer its beginning, as it is another
        one, or shorter. One that cannot be looked at, or is gone for now, counts as unchanged."""
        try:
            found = os.stat(self._name)  # noqa: PTH116  (every second, of every rank's files)
        except OSError:
            self._size = self._offset
            return False
        self._size = found.st_size
        if self._equivalence is None:
            return False
        return _equivalence(found) != self._equivalence or found.st_size < self._offset

    def rewind(self) -> None:
        """Read from the beginning the next time."""
        self._offset, self._equivalence = 0, None

    def lines(self, *, to_the_end: bool = False) -> Iterator[bytes]:
        """New lines since the last look: those within the next MiB, or all.

        A line longer than that is no row of ours: it comes in pieces. Raises OSError.
        """
        if self._size <= self._offset:
            return
        # Not open(): a third of the time, and this runs for every rank's files.
        descriptor = os.open(self._name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._equivalence = _equivalence(os.fstat(descriptor))
            while chunk := self._next_chunk(descriptor):
                yield from chunk.splitlines()
                if not to_the_end:
                    return
        finally:
            os.close(descriptor)

    def _next_chunk(self, descriptor: int) -> bytes:
        """Whole lines; nothing where there is none yet. What is handed out is not read again."""
        chunk = os.pread(descriptor, _CHUNK_BYTES, self._offset)
        whole = len(chunk) if len(chunk) == _CHUNK_BYTES else 0
        end = chunk.rfind(b"\n") + 1 or whole
        self._offset += end
        return chunk[:end]


def _equivalence(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
