"""Folders for the temporary files of a trial's launcher, removed whatever is killed.

mpirun and Spark remove their files at their end, but not when they are killed. Open MPI then leaves
16 MiB of shared memory for each rank, Spark its local folders and unpacked libraries.
"""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.host import cleaner
from paceline.host.processes import TOKEN_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (the folder itself has a random name)
_PREFIX = "paceline-"
_KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class TemporaryFolders:
    """Folders on this host that exist until the end of the trial."""

    disk: Path
    memory: Path  # in shared memory if there is some


@contextmanager
def temporary_folders(token: str) -> Iterator[TemporaryFolders]:
    """Make the folders and remove them after the block.

    If this process is killed, another one removes them and ends all processes with `token`.
    """
    disk = Path(tempfile.mkdtemp(prefix=_PREFIX))
    has_memory = os.access(_SHARED_MEMORY, os.W_OK)
    memory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_SHARED_MEMORY if has_memory else disk))
    with _cleaner(token, disk, memory):
        try:
            yield TemporaryFolders(disk, memory)
        finally:
            for folder in (disk, memory):
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _cleaner(token: str, *folders: Path) -> Iterator[None]:
    # The source instead of the path: the package may be in an archive.
    program = [sys.executable, "-I", "-S", "-c", inspect.getsource(cleaner)]
    process = subprocess.Popen(
        [*program, str(os.getpid()), f"{TOKEN_VARIABLE}={token}", *map(str, folders)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C ends only this process, which then cleans up itself
    )
    try:
        yield
    finally:
        process.kill()
        process.wait(timeout=_KILL_S)
