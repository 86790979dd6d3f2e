"""Files that are files: a pipe or a device in the place of one would be read for ever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_MOST_BYTES = 64 * 2**20  # of a file with Python or TOML


def regular_bytes(path: Path) -> bytes:
    """Return the content of a file that a person wrote. Raises OSError for another kind of file,
    and for one that is too large."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
        os.close(descriptor)
        is_file = stat.S_ISREG(found.st_mode)
        most = f"expected at most {_MOST_BYTES >> 20} MiB"
        what = most if is_file else "expected a file, got a folder, a pipe or a device"
        raise OSError(errno.EFBIG if is_file else errno.EINVAL, what, str(path))
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def irregular_file(folder: Path, unread: str) -> Path | None:
    """Return a pipe, a device or a socket below a folder, or a link to one; None without any.

    unread: name of folders whose files are not read.
    """
    for place, folders, names in os.walk(folder):
        if unread in folders:
            folders.remove(unread)
        for name in names:
            path = Path(place, name)
            try:
                mode = path.stat().st_mode
            except OSError:
                continue  # a link that leads nowhere: its reader says so
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                return path
    return None
