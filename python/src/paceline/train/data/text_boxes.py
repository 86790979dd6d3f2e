"""Images with boxes of text, as ICDAR publishes them: FOLDER/images/NAME.jpg, and
FOLDER/boxes/gt_NAME.txt or NAME.txt.

A line of a text file is one box: four corners (ICDAR 2015), or left, top, right and bottom (ICDAR
2013), in pixels, then what is written there. Boxes whose text is ### do not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import cos, radians, sin
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from paceline.base.errors import DataError
from paceline.train.data.images import BadImage, decode, images_of, normalise, scaled_size

CELL = 4  # pixels of the side of an output's cell
IGNORED = -1.0  # in place of 1 for text, where it is not known what cells are
_UNREADABLE = "###"
_NUMBERS = (8, 4)  # of a line: corners, or sides
_RIGHT_ANGLE = 90.0

BoxSample = tuple[NDArray[np.uint8], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A box in pixels; its width has the angle to the rows of the image, clockwise, in radians."""

    x: float  # of the centre
    y: float
    width: float
    height: float
    angle: float = 0.0

    def places(
        self, x: NDArray[np.float64], y: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the places of points along width and height, from the corner of both."""
        right, down = x - self.x, y - self.y
        along = cos(self.angle) * right + sin(self.angle) * down + self.width / 2
        across = cos(self.angle) * down - sin(self.angle) * right + self.height / 2
        return along, across

    def edges(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the distances of points to top, right, bottom and left edge, positive inside."""
        along, across = self.places(x, y)
        return np.stack([across, self.width - along, self.height - across, along])


def empty_target(size: int, *, with_angle: bool) -> NDArray[np.float32]:
    """Return the target of an image without text: whether a cell is text, the distances from its
    centre to four edges, in image sizes, and the angle, in radians."""
    return np.zeros((6 if with_angle else 5, size // CELL, size // CELL), dtype=np.float32)


def add_box(target: NDArray[np.float32], box: Rectangle, *, counts: bool = True) -> None:
    """Write a box into the cells of a target whose centres it covers."""
    side = target.shape[1]
    centres = (np.arange(side) + 0.5) * CELL
    y, x = np.meshgrid(centres, centres, indexing="ij")
    edges = box.edges(x, y)
    inside = (edges > 0).all(0)
    target[0][inside] = 1 if counts else IGNORED
    target[1:5, inside] = edges[:, inside] / (side * CELL)
    target[5:, inside] = box.angle


class ImagesWithText:
    """A map-style data set: pixels of shape (size, size, 3), and targets of `add_box`.

    The shorter side is scaled to `size`, then the centre is cropped. Without angles, boxes are the
    upright ones around those in the files.
    """

    def __init__(self, folder: str | Path, size: int, *, with_angle: bool) -> None:
        """Raises DataError if there are no images, or if one has no text file."""
        root = Path(folder)
        self._size, self._with_angle = size, with_angle
        images = images_of(root, "boxes/gt_NAME.txt")
        self._files = [(image, _boxes_of(root, image)) for image in images]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> BoxSample:
        """Raises DataError if a file is damaged or a line is no box."""
        image, file = self._files[index]
        try:
            stored, info = normalise(image.read_bytes())
            pixels = decode(stored, self._size)
            width, height = scaled_size(info.width, info.height, self._size)
            text = file.read_bytes().decode("utf-8-sig")
        except (BadImage, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{image} or {file.name}: {error}") from None
        target = empty_target(self._size, with_angle=self._with_angle)
        scale = np.array([width / info.width, height / info.height])
        start = np.array([(width - self._size) // 2, (height - self._size) // 2])
        for corners, counts in _boxes(text, file):
            box = _around(corners * scale - start, with_angle=self._with_angle)
            add_box(target, box, counts=counts)
        return pixels, target


def _boxes_of(root: Path, image: Path) -> Path:
    for name in (f"gt_{image.stem}.txt", f"{image.stem}.txt"):
        file = root / "boxes" / name
        if file.is_file():
            return file
    raise DataError(f"{root}: expected boxes/gt_{image.stem}.txt for {image.name}, found none")


def _boxes(text: str, file: Path) -> Iterator[tuple[NDArray[np.float64], bool]]:
    """Yield the corners of each box, shape (4, 2), and whether it counts."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        words = line.split(",") if "," in line else line.split()
        numbers = _leading_numbers(words)
        count = next((count for count in _NUMBERS if len(numbers) >= count), None)
        if count is None:
            raise DataError(
                f"{file}, line {number}: expected four corners, or left, top, right and bottom, "
                f"then a text, got {line[:80]!r}"
            )
        written = "" if count == len(words) else words[count].strip()
        yield _corners(numbers[:count]), written != _UNREADABLE


def _leading_numbers(words: list[str]) -> list[float]:
    found: list[float] = []
    for word in words[: max(_NUMBERS)]:
        try:
            found.append(float(word))
        except ValueError:
            break
    return found if np.isfinite(found).all() else []


def _corners(numbers: list[float]) -> NDArray[np.float64]:
    if len(numbers) == max(_NUMBERS):
        return np.array(numbers).reshape(4, 2)
    left, top, right, bottom = numbers
    return np.array([(left, top), (right, top), (right, bottom), (left, bottom)])


def _around(corners: NDArray[np.float64], *, with_angle: bool) -> Rectangle:
    """Return the smallest rectangle around four corners; angles are at most 45 degrees."""
    if not with_angle:
        low, high = corners.min(0), corners.max(0)
        return Rectangle(*((low + high) / 2).tolist(), *(high - low).tolist())
    (x, y), (width, height), angle = cv2.minAreaRect(corners.astype(np.float32))
    if angle > _RIGHT_ANGLE / 2:
        angle, width, height = angle - _RIGHT_ANGLE, height, width
    return Rectangle(x, y, width, height, radians(angle))
