"""The lock of a run directory: at most one process runs trials into it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.host.locks import try_lock
from paceline.host.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.records.layout import RunFiles

_WAIT_S = 0.2  # `has_writer` holds the lock for a moment


@contextmanager
def only_writer(run: RunFiles) -> Iterator[bool]:
    """Hold the lock while the context is active; yield False if another process holds it.

    Raises OSError if the file cannot be written.
    """
    with run.lock.open("w") as file:
        yield wait_until(lambda: try_lock(file), _WAIT_S)


def has_writer(run: RunFiles) -> bool:
    """Return whether a process of this machine is running trials into the run directory."""
    try:
        with run.lock.open() as file:
            return not try_lock(file, shared=True)
    except OSError:  # there is no lock, or it cannot be read
        return False
