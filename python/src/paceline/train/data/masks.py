"""Images with masks for segmentation: FOLDER/images/NAME.jpg and FOLDER/masks/NAME.png.

A mask is a PNG with one channel or a palette. The value of a pixel is the index of its class.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.base.errors import DataError
from paceline.train.data.images import BadImage, decode, image_header, normalise, scaled_size

Pair = tuple[NDArray[np.uint8], NDArray[np.uint8]]
_SUFFIXES = (".jpg", ".jpeg", ".png")


class ImagesWithMasks:
    """A map-style data set: pixels of shape (size, size, 3), and classes of shape (size, size).

    The shorter side is scaled to `size`, then the centre is cropped. Masks are not interpolated.
    """

    def __init__(self, folder: str | Path, size: int, classes: int) -> None:
        """Raises DataError if there are no images, or if one has no mask."""
        root = Path(folder)
        self._size, self._classes = size, classes
        images = sorted(p for p in root.glob("images/*") if p.suffix.lower() in _SUFFIXES)
        self._files = [(image, root / "masks" / f"{image.stem}.png") for image in images]
        if not images:
            raise DataError(
                f"{root}: expected images/NAME.jpg (or .png) and masks/NAME.png, found no image"
            )
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
            pixels, classes = decode(stored, self._size), read_mask(mask.read_bytes(), self._size)
            shape = image_header(mask.read_bytes())
        except (BadImage, OSError) as error:
            raise DataError(f"{image} or its mask: {error}") from None
        if (shape.width, shape.height) != (info.width, info.height):
            raise DataError(f"{mask}: expected the size of its image, {info.width}x{info.height}")
        if classes.max() >= self._classes:
            raise DataError(
                f"{mask}: expected classes from 0 to {self._classes - 1}, got {classes.max()}; set "
                "the number of classes in the task's options"
            )
        return pixels, classes


def read_mask(data: bytes, size: int) -> NDArray[np.uint8]:
    """Return the classes of a mask, shape (size, size). Raises BadImage for other images."""
    header = image_header(data)
    with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as mask:
        if mask.mode not in ("L", "P", "1"):
            raise BadImage(f"expected a mask with one channel or a palette, got mode {mask.mode}")
        width, height = scaled_size(header.width, header.height, size)
        scaled = np.asarray(mask.resize((width, height), Image.Resampling.NEAREST), dtype=np.uint8)
    top, left = (height - size) // 2, (width - size) // 2
    return np.ascontiguousarray(scaled[top : top + size, left : left + size])
