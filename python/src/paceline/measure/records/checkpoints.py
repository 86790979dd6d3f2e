"""Checkpoints of a training as files: written atomically, checked when they are opened.

    checkpoints/step-000000040/rank-0-of-2.safetensors   the part of rank 0
    checkpoints/step-000000040/rank-0-of-2.sha256        its checksum, as sha256sum writes it

The number is that of the steps done. A file gets its name only when it is complete and on disk, and
its checksum only afterwards. So a checkpoint is complete if every rank has a checksum, whenever its
writers were killed. No rank waits for another one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from paceline.base.errors import DataError
from paceline.measure.records.files import sync_folder

# Asks a rank for a checkpoint; the training goes on.
CHECKPOINT_SIGNAL = signal.SIGUSR1
KEPT = 2  # complete checkpoints: if the newest is damaged, there is another one
_STEP = re.compile(r"step-(\d{9,15})")
_PART = re.compile(r"rank-(\d{1,6})-of-(\d{1,6})\.sha256")
_CHECKSUM = re.compile(r"([0-9a-f]{64})  (\S+)\n")
_TEMPORARY, _DELETED = ".part", ".deleted-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. Its files may still be damaged; `check` reads them."""

    folder: Path
    steps: int  # done before it was written
    ranks: int  # that wrote it

    def part(self, rank: int) -> Path:
        """Return the file of a rank."""
        return self.folder / _name(rank, self.ranks)

    def check(self) -> None:
        """Read all files. Raises DataError that names one whose checksum is wrong."""
        for rank in range(self.ranks):
            _check(self.part(rank))


class CheckpointFolder:
    """All checkpoints of a trial."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def complete(self) -> list[Checkpoint]:
        """Return the complete checkpoints, the newest first."""
        found = (self._complete(steps, path) for steps, path in self._folders())
        return sorted((c for c in found if c), key=lambda c: c.steps, reverse=True)

    def newest(self, report: Callable[[str], object]) -> Checkpoint | None:
        """Return the newest checkpoint whose files are undamaged; None if there is none.

        report: gets a message for each damaged one, which is then removed.
        """
        for checkpoint in self.complete():
            try:
                checkpoint.check()
            except DataError as error:
                report(f"{error}; trying the checkpoint before it")
                self._remove(checkpoint.folder)
            else:
                return checkpoint
        return None

    def write(
        self, steps: int, rank: int, ranks: int, content: Callable[[HashedFile], object]
    ) -> int:
        """Write the part of a rank, durably; return its size in bytes.

        content: writes it. Raises OSError; the unfinished file is then removed.
        """
        folder = self.root / f"step-{steps:09d}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _name(rank, ranks)
        with _replacing(path) as file:
            content(file)
            digest, size = file.digest.hexdigest(), file.size
        with _replacing(path.with_suffix(".sha256")) as file:
            file.write(f"{digest}  {path.name}\n".encode())
        sync_folder(folder)
        sync_folder(self.root)
        return size

    def prune(self) -> None:
        """Remove what is older than the newest complete checkpoints, `KEPT` of them."""
        complete = self.complete()
        if len(complete) < KEPT:
            return
        oldest = complete[KEPT - 1].steps
        for steps, path in self._folders():
            if steps < oldest:
                self._remove(path)

    def clean(self, keep: Checkpoint | None) -> None:
        """Remove everything newer than `keep`, and what killed writers left.

        Call it while nobody writes. keep: the checkpoint from which the training continues; None
        removes all.
        """
        for steps, path in self._folders():
            if keep is None or steps > keep.steps or not self._complete(steps, path):
                self._remove(path)
        for path in self.root.glob(f"{_DELETED}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.root.glob(f"step-*/.*{_TEMPORARY}"):
            path.unlink(missing_ok=True)

    def _folders(self) -> Iterator[tuple[int, Path]]:
        for path in sorted(self.root.glob("step-*")):
            found = _STEP.fullmatch(path.name)
            if found is not None and path.is_dir():
                yield int(found.group(1)), path

    @staticmethod
    def _complete(steps: int, folder: Path) -> Checkpoint | None:
        found = [match for path in folder.glob("*.sha256") if (match := _PART.fullmatch(path.name))]
        written: dict[int, set[int]] = {}
        for match in found:
            written.setdefault(int(match.group(2)), set()).add(int(match.group(1)))
        for ranks, own in written.items():
            if len(own) == ranks and max(own) < ranks:
                return Checkpoint(folder, steps, ranks)
        return None

    def _remove(self, folder: Path) -> None:
        """Remove a checkpoint; a kill meanwhile does not leave a damaged one."""
        doomed = self.root / f"{_DELETED}{folder.name}"
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


class HashedFile:
    """A file that is being written, with the checksum of what it has so far."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0  # bytes

    def write(self, data: memoryview | bytes) -> None:
        """Write all of `data`."""
        rest = memoryview(data)
        self.digest.update(rest)
        self.size += len(rest)
        while rest:  # a full disk may accept a part of it; then the next write fails
            rest = rest[self._file.write(rest) :]


@contextmanager
def _replacing(path: Path) -> Iterator[HashedFile]:
    """Open a new file that replaces `path` durably if the block ends well."""
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    try:
        with FileIO(temporary, "w") as file:
            yield HashedFile(file)
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _name(rank: int, ranks: int) -> str:
    return f"rank-{rank}-of-{ranks}.safetensors"


def _check(path: Path) -> None:
    """Raise DataError if a file of a checkpoint is missing or not as it was written."""
    try:
        expected = _CHECKSUM.fullmatch(path.with_suffix(".sha256").read_text("ascii"))
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected a readable part of a checkpoint: {error}") from error
    if expected is None or expected.groups() != (digest.hexdigest(), path.name):
        raise DataError(f"{path}: damaged: its SHA-256 is not the one written beside it")
