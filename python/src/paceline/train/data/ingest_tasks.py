"""Code that runs in the Spark tasks of an ingest: examine images, then read them for storing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.base.errors import DataError
from paceline.train.data.folders import printable
from paceline.train.data.images import BadImage, ImageInfo, inspect, normalise

Row = tuple[int, int, bytearray, str, str]  # in the order of the columns of ingest.petastorm_schema


@dataclass(frozen=True, slots=True)
class ImageFinding:
    """Result of the first pass: `info` of a good image or `reason` of a bad one."""

    index: int  # in the scanned folder
    size_bytes: int
    sha256: str  # of the file
    info: ImageInfo | None
    reason: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """The sample that an image becomes."""

    sample_id: int
    label: int
    path: str  # relative to the image folder
    sha256: str  # of the file in the first pass


def examine(root: str, images: Iterable[tuple[int, str]]) -> Iterator[ImageFinding]:
    """Decode (index, path) images fully, one in memory at a time."""
    for index, path in images:
        try:
            data = _read(root, path)
        except OSError as error:
            yield ImageFinding(index, 0, "", None, f"cannot be read: {error.strerror or error}")
            continue
        digest = hashlib.sha256(data).hexdigest()
        try:
            yield ImageFinding(index, len(data), digest, inspect(data), "")
        except BadImage as error:
            yield ImageFinding(index, len(data), digest, None, str(error))


def rows_of(root: str, assignments: Iterable[Assignment]) -> Iterator[Row]:
    """Yield the rows to store, one image in memory at a time.

    Raises DataError if an image was changed after the first pass.
    """
    for item in assignments:
        data = _read(root, item.path)
        if hashlib.sha256(data).hexdigest() != item.sha256:
            raise DataError(
                f"{printable(item.path)}: the image was changed while it was ingested; run the "
                "ingest again while no other process writes to the folder"
            )
        stored, _ = normalise(data)
        digest = hashlib.sha256(stored).hexdigest()
        yield item.sample_id, item.label, bytearray(stored), digest, printable(item.path)


def _read(root: str, path: str) -> bytes:
    with open(os.path.join(root, path), "rb") as file:  # noqa: PTH118, PTH123 (any bytes in names)
        return file.read()
