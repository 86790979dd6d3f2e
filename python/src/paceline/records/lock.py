"""The lock of a run directory: at most one process runs trials into it."""

from __future__ import annotations

import fcntl
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.records.layout import RunFiles

_TRIES, _PAUSE_S = 5, 0.05  # `has_writer` holds the lock for a moment


@contextmanager
def only_writer(run: RunFiles) -> Iterator[bool]:
    """Hold the lock while the context is active; yield False if another process holds it.

    Raises OSError if the file cannot be written.
    """
    with run.lock.open("w") as file:
        for left in reversed(range(_TRIES)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not left:
                    yield False
                    return
                time.sleep(_PAUSE_S)
            else:
                yield True
                return


def has_writer(run: RunFiles) -> bool:
    """Return whether a process of this machine is running trials into the run directory."""
    try:
        with run.lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no lock, or it cannot be read
        return False
    return False
