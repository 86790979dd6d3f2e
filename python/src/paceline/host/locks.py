"""Locks between processes of this host, which the kernel releases when their holder ends."""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.errors import TimedOut
from paceline.host.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import IO

    Lockable = IO[str] | int  # an open file, or its descriptor


@contextmanager
def exclusive_lock(path: Path, limit_s: float, otherwise: str) -> Iterator[None]:
    """Hold the lock of the file `path`, which is created if it does not exist.

    Raises TimedOut with the message `otherwise` if another process holds it for `limit_s`.
    """
    with path.open("a") as file:
        if not wait_until(lambda: try_lock(file), limit_s, poll_s=0.1):
            raise TimedOut(otherwise)
        yield


def try_lock(file: Lockable, *, shared: bool = False) -> bool:
    """Lock an open file or folder until it is closed; return False if another process holds it."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
