"""Temporary folders of this user that are removed even if their process is killed."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.host.locks import try_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

# A folder younger than this may not be locked yet.
_NEW_S = 60.0


@contextmanager
def own_folder(prefix: str) -> Iterator[Path]:
    """Yield a new temporary folder and remove it at the end. Raises OSError if it cannot be made.

    This process keeps it locked. Folders with the same prefix that nobody has locked are of killed
    processes; those of this user are removed first.
    """
    parent = Path(tempfile.gettempdir())
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
            if is_ours and try_lock(descriptor):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def _open_folder(folder: Path) -> int:
    """Open a folder, but neither a link to one nor a pipe, which would block."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
