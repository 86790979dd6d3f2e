"""One image: check that it is complete, normalise it for storing, decode it to pixels.

Ingest is strict so that reading can be fast. Pillow decodes every image fully once (it raises on a
truncated JPEG, where OpenCV only warns: opencv/opencv#6468), and what is stored is always an
upright 8-bit RGB JPEG or PNG. Reading relies on the checksum and uses OpenCV.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from paceline.base.errors import DataError, PacelineError

# Three times a 60-megapixel camera; a larger image is treated as a decompression bomb.
MAX_PIXELS = 180_000_000
_JPEG_QUALITY = 95
_EXIF_ORIENTATION = 0x0112
_REDUCED = {
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}


class BadImage(DataError):  # noqa: N818  (reads as the sentence the user sees)
    """The bytes are not a usable image; the message gives the reason, without the file name."""


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """Result of `inspect`. width and height are those of the upright image, in pixels."""

    format: str  # "JPEG" or "PNG"
    width: int
    height: int
    verbatim: bool  # already upright 8-bit RGB: its bytes are stored unchanged


def inspect(data: bytes) -> ImageInfo:
    """Decode `data` fully and describe it. Raises BadImage if it is damaged or not supported."""
    with _opened(data) as image:
        return _info(image, data)


def normalise(data: bytes) -> tuple[bytes, ImageInfo]:
    """Return the bytes to store for an image: its own if upright 8-bit RGB, else an RGB JPEG.

    Greyscale, CMYK, palette, transparent (laid on white), 16-bit and EXIF-rotated images become
    upright RGB JPEG of quality 95 without chroma subsampling. Raises BadImage.
    """
    with _opened(data) as image:
        info = _info(image, data)
        if info.verbatim:
            return data, info
        upright = ImageOps.exif_transpose(image)
        target = io.BytesIO()
        _to_rgb(upright).save(target, "JPEG", quality=_JPEG_QUALITY, subsampling=0)
        return target.getvalue(), info


def decode(data: bytes, image_size: int) -> NDArray[np.uint8]:
    """Return the pixels of a stored image: uint8 RGB of shape (image_size, image_size, 3).

    The shorter side is scaled to `image_size`, then the centre is cropped. A JPEG is decoded at a
    half, a quarter or an eighth of its size where that still covers `image_size`: libjpeg scales
    in the DCT domain, which saves much work and is deterministic. Then it is resized with area
    averaging, or with cubic interpolation if it is smaller. The result is deterministic for one
    version of OpenCV, for any number of threads. Raises BadImage if OpenCV cannot decode it.
    """
    flags = _reduction(data, image_size) | cv2.IMREAD_IGNORE_ORIENTATION
    bgr: Any = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), flags)
    if bgr is None:
        raise BadImage("expected a JPEG or PNG image, but OpenCV cannot decode it")
    height, width = bgr.shape[:2]
    scale = image_size / min(height, width)
    new_width, new_height = (max(image_size, round(side * scale)) for side in (width, height))
    if (new_width, new_height) != (width, height):
        method = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
        bgr = cv2.resize(bgr, (new_width, new_height), interpolation=method)
    top, left = (new_height - image_size) // 2, (new_width - image_size) // 2
    square = np.ascontiguousarray(bgr[top : top + image_size, left : left + image_size])
    rgb: Any = cv2.cvtColor(square, cv2.COLOR_BGR2RGB)
    return np.asarray(rgb, dtype=np.uint8)


def _reduction(data: bytes, image_size: int) -> int:
    """Return OpenCV's flag for the strongest reduction of a JPEG that still covers `image_size`."""
    try:
        shorter = min(JpegImageFile(io.BytesIO(data)).size)  # reads the header only
    except (SyntaxError, OSError):
        shorter = 0  # not a JPEG
    for divisor in (8, 4, 2):
        if shorter // divisor >= image_size:
            return _REDUCED[divisor]
    return cv2.IMREAD_COLOR


@contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    """Yield the fully decoded Pillow image; every failure to decode becomes BadImage."""
    if not data:
        raise BadImage("the file is empty (0 bytes)")
    try:
        with warnings.catch_warnings():
            # Our own, documented limit is checked below, before anything is decoded.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data))
            _check(image)
            image.load()
    except PacelineError:
        raise
    except UnidentifiedImageError:
        if data.startswith((b"\xff\xd8", b"\x89PNG")):
            raise BadImage("damaged: it begins like an image, but contains none") from None
        raise BadImage("not an image: expected JPEG or PNG") from None
    except Exception as error:  # noqa: BLE001  (Pillow's decoders raise almost anything)
        raise BadImage(f"damaged: {str(error) or type(error).__name__}") from None
    with image:
        yield image


def _check(image: Image.Image) -> None:
    if image.format not in ("JPEG", "MPO", "PNG"):
        raise BadImage(f"a {image.format} image: expected JPEG or PNG")
    if image.width * image.height > MAX_PIXELS:
        raise BadImage(
            f"{image.width}x{image.height} pixels: expected at most {MAX_PIXELS} "
            "(a decompression bomb?)"
        )
    if getattr(image, "is_animated", False) and image.format == "PNG":
        raise BadImage("an animated PNG: expected a single image")


def _info(image: Image.Image, data: bytes) -> ImageInfo:
    orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    verbatim = (
        image.format != "MPO"  # several images in one file
        and image.mode == "RGB"
        and "transparency" not in image.info
        and _bits_per_channel(image, data) == 8
        and orientation in (0, 1)
    )
    turned = orientation in (5, 6, 7, 8)
    width, height = (image.height, image.width) if turned else (image.width, image.height)
    stored_format = "PNG" if image.format == "PNG" else "JPEG"
    return ImageInfo(stored_format, width, height, verbatim)


def _bits_per_channel(image: Image.Image, data: bytes) -> int:
    """Return 16 for a PNG whose header says so: Pillow shows 16-bit RGB as mode RGB."""
    # PNG (ISO/IEC 15948), 11.2.2: signature 8 bytes, IHDR length and type 8, width 4, height 4.
    return data[24] if image.format == "PNG" else 8


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I;16", "I;16B", "I;16L", "I"):
        # 16-bit grey: Pillow's own conversion clips at 255 instead of scaling.
        grey = (np.asarray(image, dtype=np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        layer = image.convert("RGBA")
        paper = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(paper, layer).convert("RGB")
    return image.convert("RGB")


# --- class folders: which files of an image folder are images, and how they are named ------------
#
# Each folder directly in the image folder is a class with the folder's name. Every regular file in
# it, at any depth, is one of its images and must be a JPEG or PNG, whatever its suffix. Only texts
# and tables (`readme.txt`, `labels.csv`) are left out and reported. Ignored are names that begin
# with a dot (also macOS's `._NAME`), `Thumbs.db`, `desktop.ini` and the folder `__MACOSX`. Files
# directly in the image folder belong to no class and are ignored.

_JUNK = frozenset({"thumbs.db", "desktop.ini", "__macosx", "ehthumbs.db", "icon\r"})
_NO_IMAGES = (".txt", ".md", ".csv", ".tsv", ".json", ".xml", ".html", ".yaml", ".yml", ".log")
_LAYOUT = "expected IMAGES/CLASS/IMAGE.jpg with a folder for each of two or more classes"


@dataclass(frozen=True, slots=True)
class ImageFile:
    """The path of an image relative to the image folder, and its class index."""

    path: str
    label: int


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """Sorted class names, and all images sorted by (class, path).

    others: paths of texts and tables in the class folders, which are left out.
    """

    root: Path
    classes: tuple[str, ...]
    images: tuple[ImageFile, ...]
    others: tuple[str, ...] = ()


def scan(root: Path) -> ImageFolder:
    """List the images of `root`.

    Raises DataError naming every class folder without an image, and a folder that cannot be read.
    """
    if not root.is_dir():
        what = "it is not a folder" if root.exists() else "it does not exist"
        raise DataError(f"{root}: {_LAYOUT}, but {what}; `paceline data synth` makes an example")
    classes = _class_names(root)
    if len(classes) < 2:
        found = f"only the class {classes[0]!r}" if classes else "no class folder"
        raise DataError(f"{root}: {_LAYOUT}, found {found}")
    files = [(label, path) for label, name in enumerate(classes) for path in _files(root, name)]
    images = [ImageFile(path, label) for label, path in files if not _is_other(path)]
    used = {image.label for image in images}
    empty = [name for label, name in enumerate(classes) if label not in used]
    if empty:
        raise DataError(
            f"{root}: class folder{'s' if len(empty) > 1 else ''} without an image: "
            f"{', '.join(map(repr, empty))}; add images or remove the folder"
        )
    others = tuple(path for _, path in files if _is_other(path))
    return ImageFolder(root.resolve(), tuple(classes), tuple(images), others)


def _class_names(root: Path) -> list[str]:
    try:
        return sorted(e.name for e in root.iterdir() if e.is_dir() and not is_junk(e.name))
    except OSError as error:
        raise _unreadable(error) from None


def _is_other(path: str) -> bool:
    """Return whether a file is a text or a table by its suffix."""
    return path.casefold().endswith(_NO_IMAGES)


def _unreadable(error: OSError) -> DataError:
    return DataError(
        f"{error.filename}: the folder cannot be read ({error.strerror}); allow reading it, or "
        "remove it"
    )


def is_junk(name: str) -> bool:
    """Return whether a file or folder of this name is ignored."""
    return name.startswith(".") or name.casefold() in _JUNK


def printable(path: str) -> str:
    """Return `path` as valid text: bytes that are not UTF-8 become \\xNN."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _files(root: Path, name: str) -> list[str]:
    def stop(error: OSError) -> None:
        raise _unreadable(error)

    found = []
    for folder, folders, files in os.walk(root / name, onerror=stop):
        folders[:] = [f for f in folders if not is_junk(f)]
        for file in files:
            full = os.path.join(folder, file)  # noqa: PTH118  (names need not be valid text)
            if not is_junk(file) and os.path.isfile(full):  # noqa: PTH113
                found.append(os.path.relpath(full, root))
    return sorted(found)
