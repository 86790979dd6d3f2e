"""New lines of a file that another process appends to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CHUNK_BYTES = 1 << 20


class LineTail:
    """Continues where the last call stopped; an unfinished line waits for the next call.

    Call `was_replaced` before `lines`: a file that has not grown is not opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = str(path)
        self._offset = self._size = 0
        self._identity: tuple[int, int] | None = None  # device and inode of the file read so far

    def was_replaced(self) -> bool:
        """Return whether the file is another one than before, or shorter than what was read. A file
        that cannot be examined counts as unchanged."""
        try:
            found = os.stat(self._name)  # noqa: PTH116  (every second, of every rank's files)
        except OSError:
            self._size = self._offset
            return False
        self._size = found.st_size
        if self._identity is None:
            return False
        return _identity(found) != self._identity or found.st_size < self._offset

    def rewind(self) -> None:
        """Start at the beginning in the next call."""
        self._offset, self._identity = 0, None

    def lines(self, *, to_the_end: bool = False) -> Iterator[bytes]:
        """Yield new lines: those within the next MiB, or all of them (`to_the_end`).

        A longer line is not a row of a run; it comes in pieces. Raises OSError.
        """
        if self._size <= self._offset:
            return
        # os.open takes a third of the time of open(), and this runs for every rank's files.
        descriptor = os.open(self._name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._identity = _identity(os.fstat(descriptor))
            while chunk := self._next_chunk(descriptor):
                yield from chunk.splitlines()
                if not to_the_end:
                    return
        finally:
            os.close(descriptor)

    def _next_chunk(self, descriptor: int) -> bytes:
        """Return whole lines, which are not read again; empty if no line is complete yet."""
        chunk = os.pread(descriptor, _CHUNK_BYTES, self._offset)
        whole = len(chunk) if len(chunk) == _CHUNK_BYTES else 0
        end = chunk.rfind(b"\n") + 1 or whole
        self._offset += end
        return chunk[:end]


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
