"""What runs inside Spark tasks at ingest: look at photos, read them for storing."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.data.folders import printable
from paceline.data.images import BadImage, ImageInfo, inspect, normalise
from paceline.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Row = tuple[int, int, bytearray, str, str]  # in the order of dataset.COLUMNS


@dataclass(frozen=True, slots=True)
class Look:
    """What the first pass found: `info` of a good photo or `reason` of a bad one."""

    index: int  # in the scanned folder
    size_bytes: int
    sha256: str  # of the file
    info: ImageInfo | None
    reason: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which photo becomes which sample."""

    sample_id: int
    label: int
    path: str  # relative to the photo folder
    sha256: str  # of the file when it was looked at


def look_at_photos(root: str, photos: Iterable[tuple[int, str]]) -> Iterator[Look]:
    """Decode (index, path) photos fully, one in memory at a time."""
    for index, path in photos:
        try:
            data = _read(root, path)
        except OSError as error:
            reason = f"cannot be read: {error.strerror or error}"
            yield Look(index, 0, "", None, reason)
            continue
        digest = hashlib.sha256(data).hexdigest()
        try:
            yield Look(index, len(data), digest, inspect(data), "")
        except BadImage as error:
            yield Look(index, len(data), digest, None, str(error))


def rows_of(root: str, assignments: Iterable[Assignment]) -> Iterator[Row]:
    """The rows to store, one photo in memory at a time.

    Raises DataError if a photo is not the one that was looked at.
    """
    for item in assignments:
        data = _read(root, item.path)
        if hashlib.sha256(data).hexdigest() != item.sha256:
            raise DataError(
                f"{printable(item.path)}: the photo was changed while it was ingested; "
                "run the ingest again when nobody writes to the folder"
            )
        stored, _ = normalise(data)
        digest = hashlib.sha256(stored).hexdigest()
        yield item.sample_id, item.label, bytearray(stored), digest, printable(item.path)


def _read(root: str, path: str) -> bytes:
    with open(os.path.join(root, path), "rb") as file:  # noqa: PTH118, PTH123 (any bytes in names)
        return file.read()
