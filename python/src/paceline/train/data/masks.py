"""Images with masks for segmentation: FOLDER/images/NAME.jpg and FOLDER/masks/NAME.png.

A mask is a PNG with one channel or a palette. The value of a pixel is the index of its class,
unless a table says otherwise.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.base.errors import DataError
from paceline.train.data.images import (
    BadImage,
    decode,
    image_header,
    images_of,
    normalise,
    scaled_size,
)

Pair = tuple[NDArray[np.uint8], NDArray[np.uint8]]
_VALUES = 256  # of a pixel of a mask
_NO_CLASS = -1


def class_of_value(
    classes: int, ignore_index: int | None = None, given: Mapping[int, int] | None = None
) -> NDArray[np.int16]:
    """Return the class of each value of a mask's pixel; `_NO_CLASS` for those not allowed.

    ignore_index: value and class of pixels that do not count. given: the classes of all other
    values that are allowed; None: values are classes.
    """
    table = np.full(_VALUES, _NO_CLASS, dtype=np.int16)
    if ignore_index is not None:
        table[ignore_index] = ignore_index
    for value, index in (given or {i: i for i in range(min(classes, _VALUES))}).items():
        table[value] = index
    return table


class ImagesWithMasks:
    """A map-style data set: pixels of shape (size, size, 3), and classes of shape (size, size).

    The shorter side is scaled to `size`, then the centre is cropped. Masks are not interpolated.
    """

    def __init__(self, folder: str | Path, size: int, classes: NDArray[np.int16]) -> None:
        """classes: of each value of a mask's pixel, see `class_of_value`.

        Raises DataError if there are no images, or if one has no mask.
        """
        root = Path(folder)
        self._size, self._classes = size, classes
        images = images_of(root, "masks/NAME.png")
        self._files = [(image, root / "masks" / f"{image.stem}.png") for image in images]
        lacking = [image.name for image, mask in self._files if not mask.is_file()]
        if lacking:
            raise DataError(
                f"{root}: expected masks/NAME.png for each image, {len(lacking)} are missing, "
                f"first that of {lacking[0]}"
            )

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Pair:
        """Raises DataError if a file is damaged, or if a mask does not fit its image or classes."""
        image, mask = self._files[index]
        try:
            stored, info = normalise(image.read_bytes())
            pixels, values = decode(stored, self._size), read_mask(mask.read_bytes(), self._size)
            shape = image_header(mask.read_bytes())
        except (BadImage, OSError) as error:
            raise DataError(f"{image} or its mask: {error}") from None
        if (shape.width, shape.height) != (info.width, info.height):
            raise DataError(f"{mask}: expected the size of its image, {info.width}x{info.height}")
        return pixels, classes_of_values(values, self._classes, str(mask))


def classes_of_values(
    values: NDArray[np.uint8], table: NDArray[np.int16], mask: str
) -> NDArray[np.uint8]:
    """Return the classes of a mask's pixels, from `class_of_value`. mask: its name.

    Raises DataError for a value without a class.
    """
    classes = table[values]
    if classes.min() == _NO_CLASS:
        allowed = np.flatnonzero(table != _NO_CLASS)
        raise DataError(
            f"{mask}: expected values {_ranges(allowed)}, got "
            f"{values[classes == _NO_CLASS].max()}; set classes, ignore_index or mask_values in "
            "the options of the task"
        )
    return classes.astype(np.uint8)


def _ranges(values: NDArray[np.int64]) -> str:
    """Return ascending numbers as in "0 to 20, 255"."""
    runs = np.split(values, np.flatnonzero(np.diff(values) > 1) + 1)
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def read_mask(data: bytes, size: int) -> NDArray[np.uint8]:
    """Return the values of a mask, shape (size, size). Raises BadImage for other images."""
    header = image_header(data)
    with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as mask:
        if mask.mode not in ("L", "P", "1"):
            raise BadImage(f"expected a mask with one channel or a palette, got mode {mask.mode}")
        width, height = scaled_size(header.width, header.height, size)
        scaled = np.asarray(mask.resize((width, height), Image.Resampling.NEAREST), dtype=np.uint8)
    top, left = (height - size) // 2, (width - size) // 2
    return np.ascontiguousarray(scaled[top : top + size, left : left + size])
