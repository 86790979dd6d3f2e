"""Images with masks for segmentation: pictures, or the slices of NIfTI volumes.

Pictures: FOLDER/images/NAME.jpg and FOLDER/masks/NAME.png. A mask is a PNG with one channel or a
palette. The value of a pixel is the index of its class, unless a table says otherwise.

Volumes: FOLDER/images/NAME.nii.gz and FOLDER/masks/NAME.nii.gz. The slices are those of the last
axis, in the order of the file. The range of values of a volume is stretched to that of a grey
image.
"""

from __future__ import annotations

import io
import threading
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.base.errors import DataError, EnvironmentLacks
from paceline.base.host.programs import how_to_install
from paceline.train.data.images import (
    MAX_BYTES,
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


_SUFFIXES = (".nii", ".nii.gz")
_PERCENTILES = (0.5, 99.5)  # of a volume's values: black and white
_KEPT = 2  # volumes, whose slices are mostly read together
_AXES = 3
_VALUE_BYTES = 8  # of a voxel, at most, while it is read
_Volume = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def volumes_in(folder: str | Path) -> list[Path]:
    """Return the volumes of FOLDER/images in order of their names."""
    return sorted(p for p in Path(folder).glob("images/*") if p.name.endswith(_SUFFIXES))


class SlicesWithMasks:
    """A map-style data set: pixels of shape (size, size, 3), and classes of shape (size, size).

    The shorter side is scaled to `size`, then the centre is cropped. Masks are not interpolated.
    """

    def __init__(self, folder: str | Path, size: int, classes: NDArray[np.int16]) -> None:
        """classes: of each value of a mask, see `class_of_value`.

        Raises DataError if a volume has no mask or another shape, EnvironmentLacks without nibabel.
        """
        self._size, self._classes = size, classes
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, _Volume] = OrderedDict()
        self._files = [(p, Path(folder) / "masks" / p.name) for p in volumes_in(folder)]
        counts = [_slices(image, mask) for image, mask in self._files]
        self._firsts = np.cumsum([0, *counts])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> Pair:
        """Raises DataError if a volume is damaged, or if a value of a mask is no class."""
        number = int(np.searchsorted(self._firsts, index, side="right")) - 1
        place = index - int(self._firsts[number])
        with self._lock:  # several threads decode slices of one volume
            grey, values = self._volume(number)
        pixels = _fitted(grey[:, :, place].T, self._size, cv2.INTER_AREA)
        mask = _fitted(values[:, :, place].T, self._size, cv2.INTER_NEAREST_EXACT)
        file = self._files[number][1]
        return np.repeat(pixels[:, :, None], 3, axis=2), classes_of_values(
            mask, self._classes, f"{file}, slice {place}"
        )

    def _volume(self, number: int) -> _Volume:
        """Return image and mask of a volume, as bytes; keep those used last."""
        if number not in self._kept:
            image, mask = (_values(file) for file in self._files[number])
            low, high = np.percentile(image, _PERCENTILES)
            grey = (image - low) * (255 / max(high - low, np.finfo(np.float32).tiny))
            wrong = mask[(mask != np.round(mask)) | (mask < 0) | (mask > 255)]
            if wrong.size:
                raise DataError(
                    f"{self._files[number][1]}: expected integers from 0 to 255, got {wrong[0]}"
                )
            self._kept[number] = (np.clip(grey, 0, 255).astype(np.uint8), mask.astype(np.uint8))
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]


def _slices(image: Path, mask: Path) -> int:
    """Return the number of slices of a volume."""
    if not mask.is_file():
        raise DataError(f"{mask}: expected a mask for each volume, found none")
    shape, other = _opened(image).shape, _opened(mask).shape
    if len(shape) != _AXES or 0 in shape:
        raise DataError(f"{image}: expected a volume with three axes, got shape {shape}")
    if other != shape:
        raise DataError(f"{mask}: expected the shape of its volume, {shape}, got {other}")
    if np.prod(shape, dtype=np.int64) * _VALUE_BYTES > MAX_BYTES:
        raise DataError(
            f"{image}: expected at most {MAX_BYTES // _VALUE_BYTES} voxels, got {shape}"
        )
    return int(shape[-1])


def _opened(file: Path) -> Any:
    """Open a volume; its values are read later."""
    try:
        import nibabel  # noqa: PLC0415  (an extra)
    except ModuleNotFoundError as error:
        raise EnvironmentLacks(
            f"{file}: expected the package nibabel, not installed; `{how_to_install('nifti')}` "
            "brings it"
        ) from error
    try:
        return nibabel.Nifti1Image.from_filename(file)
    except (
        OSError,
        ValueError,
        nibabel.filebasedimages.ImageFileError,
        nibabel.spatialimages.HeaderDataError,
    ) as error:
        raise DataError(f"{file}: expected a NIfTI volume: {error}") from None


def _values(file: Path) -> NDArray[np.float32]:
    try:
        found: NDArray[np.float32] = _opened(file).get_fdata(caching="unchanged", dtype=np.float32)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: damaged volume: {error}") from None
    if not np.isfinite(found).all():
        raise DataError(f"{file}: expected finite values")
    return found


def _fitted(pixels: NDArray[np.uint8], size: int, method: int) -> NDArray[np.uint8]:
    """Return the centre of an image whose shorter side is scaled to `size`."""
    height, width = pixels.shape
    new_width, new_height = scaled_size(width, height, size)
    if method == cv2.INTER_AREA and size > min(height, width):
        method = cv2.INTER_CUBIC
    scaled = cv2.resize(np.ascontiguousarray(pixels), (new_width, new_height), interpolation=method)
    top, left = (new_height - size) // 2, (new_width - size) // 2
    return np.ascontiguousarray(scaled[top : top + size, left : left + size], dtype=np.uint8)
