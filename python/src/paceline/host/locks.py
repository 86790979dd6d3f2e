"""Locks between processes of this host."""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from paceline.errors import TimedOut
from paceline.host.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def exclusive_lock(path: Path, limit_s: float, otherwise: str) -> Iterator[None]:
    """Hold the lock of the file `path`; the kernel releases it when this process ends.

    Raises TimedOut with the message `otherwise` if another process holds it for `limit_s`.
    """
    with path.open("a") as file:
        if not wait_until(lambda: _is_taken(file), limit_s, poll_s=0.1):
            raise TimedOut(otherwise)
        yield


def _is_taken(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
