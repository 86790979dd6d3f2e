"""Make what takes long once for all workers of pytest."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def making_once(folder: Path) -> Iterator[bool]:
    """Yield whether the block must make the folder; other workers wait until it has ended."""
    done = folder.with_suffix(".done")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not done.exists()
        done.touch()
