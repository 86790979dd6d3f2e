"""Locks between processes of this host, which the kernel releases when their holder ends.

A lock also marks a temporary folder as used: that of a killed process is removed by the next one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

from paceline.base.errors import PacelineWarning, TimedOut
from paceline.collectives.host import wait_until

Lockable = IO[str] | int  # an open file, or its descriptor

# A folder younger than this may not be locked yet.
_NEW_S = 60.0
# Lustre without `-o flock` has the first, network and FUSE file systems the others.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


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
    """Lock an open file or folder until it is closed; return False if another process holds it.

    Warn once for a file system without locks, and return True.
    """
    locked = flock_file(file, shared=shared)
    if locked is None:
        _warn_without_locks(os.fstat(file if isinstance(file, int) else file.fileno()).st_dev)
    return locked is not False


def flock_file(file: Lockable, *, shared: bool = False) -> bool | None:
    """Lock as `try_lock`, without the warning; return None if the file system has no locks."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


@cache
def _warn_without_locks(_device: int) -> None:
    warnings.warn(
        "a file system here has no locks (flock), such as Lustre mounted without `-o flock` or "
        "object storage mounted as folders: Paceline cannot notice that two commands use the same "
        "run directory or cache, so start only one at a time",
        PacelineWarning,
        stacklevel=2,
    )


@contextmanager
def own_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield a new temporary folder and remove it at the end. Raises OSError if it cannot be made.

    parent: default: the folder for temporary files. This process keeps it locked. Folders with the
    same prefix that nobody has locked are of killed processes; those of this user are removed
    first.
    """
    parent = parent or Path(tempfile.gettempdir())
    for found in parent.glob(f"{prefix}*"):
        _remove_if_abandoned(found)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        descriptor = _open_folder(folder)
        try:
            try_lock(descriptor)
            yield folder
        finally:
            os.close(descriptor)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_abandoned(folder: Path) -> None:
    """Remove the folder unless it is in use, is new, belongs to others or is something else."""
    with suppress(OSError):  # another process may remove it at the same time
        descriptor = _open_folder(folder)
        try:
            found = os.fstat(descriptor)
            is_ours = found.st_uid == os.getuid() and time.time() - found.st_mtime > _NEW_S
            # Without locks nobody knows which folders are in use.
            if is_ours and flock_file(descriptor):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def _open_folder(folder: Path) -> int:
    """Open a folder, but neither a link to one nor a pipe, which would block."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
