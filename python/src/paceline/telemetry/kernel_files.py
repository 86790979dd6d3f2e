"""Files that the kernel writes anew whenever they are read, kept open: half the time of opening
them each time, and these are read at every tick."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_READ_BYTES = 1 << 16
# The kernel fills at least a page before it stops between two lines, and no line of the files that
# have many is longer than what is left of the page: a part this short is the last.
_LAST_PART_BYTES = 2048
_NUMBER_BYTES = 40  # with the blanks before it


class KernelFile:
    """One file of /proc or /sys; closed with the object."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def read(self) -> bytes:
        """What it says now; empty where it is not there, may not be read or the kernel declines
        (/proc/pressure without PSI, the files of a control group that is gone)."""
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            return self._whole()
        except OSError:
            self.close()
            return b""

    def close(self) -> None:
        """Let go of it; the next `read` opens it again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def _whole(self) -> bytes:
        """Long files come in parts of a page, whatever one asks for (kernel, fs/seq_file.c)."""
        content = os.pread(self._descriptor, _READ_BYTES, 0)
        part = content
        while len(part) > _LAST_PART_BYTES:
            part = os.pread(self._descriptor, _READ_BYTES, len(content))
            content += part
        return content


def number_after(content: bytes, label: bytes) -> int | None:
    """The number that follows `label` at the start of a line; None where there is no such line."""
    if content.startswith(label):
        number = len(label)
    elif (before := content.find(b"\n" + label)) >= 0:
        number = before + 1 + len(label)
    else:
        return None
    words = content[number : number + _NUMBER_BYTES].split(maxsplit=1)
    return int(words[0]) if words and words[0].isdigit() else None
