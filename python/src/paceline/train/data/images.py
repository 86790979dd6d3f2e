"""One image: check that it is complete, normalise it for storing, decode it to pixels.

Ingest is strict so that reading can be fast. Pillow decodes every image fully once (it raises on a
truncated JPEG, where OpenCV only warns: opencv/opencv#6468), and what is stored is always an
upright 8-bit RGB JPEG or PNG. Reading relies on the checksum and uses OpenCV.

Before a decoder sees an image, signature and header are checked here: OpenCV and Pillow have
decoders for dozens of formats, which a file of somebody else could choose by its first bytes, and a
small file can claim many gigabytes of pixels.
"""

from __future__ import annotations

import io
import os
import struct
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

from paceline.base.errors import DataError, PacelineError

# An image takes at most 1 GiB: up to 6 bytes for a pixel, as of a 16-bit PNG or of the coefficients
# of a progressive JPEG. It is also where Pillow stops, and three times a 60-megapixel camera.
MAX_BYTES = 1 << 30
MAX_PIXELS = MAX_BYTES // 6
_JPEG_QUALITY = 95
_EXIF_ORIENTATION = 0x0112
_SUFFIXES = (".jpg", ".jpeg", ".png")
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


def images_of(root: Path, partner: str) -> list[Path]:
    """Return the images of a folder with `images/NAME.jpg` or `.png`, in order of their names.

    partner: place of the file that belongs to each, for the message. Raises DataError without any.
    """
    images = sorted(p for p in root.glob("images/*") if p.suffix.lower() in _SUFFIXES)
    if not images:
        raise DataError(f"{root}: expected images/NAME.jpg (or .png) and {partner}, found no image")
    return images


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


def decode(data: bytes, image_size: int, *, others: bool = False) -> NDArray[np.uint8]:
    """Return the pixels of a stored image: uint8 RGB of shape (image_size, image_size, 3).

    The shorter side is scaled to `image_size`, then the centre is cropped. A JPEG is decoded at a
    half, a quarter or an eighth of its size where that still covers `image_size`: libjpeg scales
    in the DCT domain, which saves much work and is deterministic. Then it is resized with area
    averaging, or with cubic interpolation if it is smaller. The result is deterministic for one
    version of OpenCV, for any number of threads. others: BMP and WebP are allowed. Raises BadImage
    if the format is not allowed, or if OpenCV cannot decode it.
    """
    header = image_header(data, others=others)
    flags = _reduction(header, image_size) | cv2.IMREAD_IGNORE_ORIENTATION
    try:
        bgr: Any = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), flags)
    except cv2.error as error:
        raise BadImage(f"OpenCV cannot decode it: {error.err}") from None
    if bgr is None:
        raise BadImage("expected a JPEG or PNG image, but OpenCV cannot decode it")
    height, width = bgr.shape[:2]
    new_width, new_height = scaled_size(width, height, image_size)
    scale = image_size / min(height, width)
    if (new_width, new_height) != (width, height):
        method = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
        bgr = cv2.resize(bgr, (new_width, new_height), interpolation=method)
    top, left = (new_height - image_size) // 2, (new_width - image_size) // 2
    square = np.ascontiguousarray(bgr[top : top + image_size, left : left + image_size])
    rgb: Any = cv2.cvtColor(square, cv2.COLOR_BGR2RGB)
    return np.asarray(rgb, dtype=np.uint8)


def scaled_size(width: int, height: int, shorter: int) -> tuple[int, int]:
    """Return the sides after scaling the shorter one to `shorter`. Raises BadImage if an extreme
    ratio makes them too large."""
    scale = shorter / min(width, height)
    new_width, new_height = (max(shorter, round(side * scale)) for side in (width, height))
    if new_width * new_height > MAX_PIXELS:
        raise BadImage(
            f"{width}x{height} pixels would become {new_width}x{new_height}: expected at most "
            f"{MAX_PIXELS}; crop the image"
        )
    return new_width, new_height


def _reduction(header: ImageHeader, image_size: int) -> int:
    """Return OpenCV's flag for the strongest reduction of a JPEG that still covers `image_size`."""
    shorter = min(header.width, header.height) if header.format == "JPEG" else 0
    for divisor in (8, 4, 2):
        if shorter // divisor >= image_size:
            return _REDUCED[divisor]
    return cv2.IMREAD_COLOR


# --- header: which format the bytes have, and how many pixels they become -------------------------

_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOFn: all but DHT, JPG and DAC
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})  # TEM and RSTn
_SCAN, _END = 0xDA, 0xD9
_BMP, _WEBP = b"BM", b"RIFF"
_REFUSED = {
    _BMP: "BMP",
    _WEBP: "WebP",
    b"GIF8": "GIF",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"\0\0\0\x0cjP": "JPEG 2000",
    b"\xff\x4f\xff\x51": "JPEG 2000",
}
_ANIMATED = 0x02  # flag of WebP


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Format and size of an image by its first bytes; width and height as stored, in pixels."""

    format: str
    width: int
    height: int


def image_header(data: bytes, *, others: bool = False) -> ImageHeader:
    """Read the header of a JPEG or PNG, without a decoder; others: also of BMP or WebP.

    Raises BadImage for everything else, and for an image that would take too much memory.
    """
    if not data:
        raise BadImage("the file is empty (0 bytes)")
    if len(data) > MAX_BYTES:
        raise BadImage(f"{len(data)} bytes: expected at most {MAX_BYTES}")
    if data.startswith(_JPEG):
        header = ImageHeader("JPEG", *_size_of_jpeg(data))
    elif data.startswith(_PNG):
        header = ImageHeader("PNG", *_size_of_png(data))
    elif others and data.startswith(_BMP):
        header = ImageHeader("BMP", *_size_of_bmp(data))
    elif others and data.startswith(_WEBP):
        header = ImageHeader("WebP", *_size_of_webp(data))
    elif data.startswith((_JPEG[:2], _PNG[:4])):
        raise _damaged()
    else:
        other = next((name for sign, name in _REFUSED.items() if data.startswith(sign)), None)
        found = "not an image" if other is None else f"a {other} image"
        raise BadImage(f"{found}: expected JPEG or PNG")
    if not header.width or not header.height:
        raise _damaged()
    if header.width * header.height > MAX_PIXELS:
        raise BadImage(
            f"{header.width}x{header.height} pixels: expected at most {MAX_PIXELS} "
            "(a decompression bomb?)"
        )
    return header


def _damaged() -> BadImage:
    return BadImage("damaged: it begins like an image, but contains none")


def _size_of_jpeg(data: bytes) -> tuple[int, int]:
    """Return width and height of the first frame, which is the only one that libjpeg allows.

    Markers are found as libjpeg finds them (jdmarker.c, next_marker): other bytes between them are
    skipped.
    """
    place = 2
    while (place := data.find(b"\xff", place)) >= 0:
        while data[place : place + 1] == b"\xff":
            place += 1
        marker = data[place] if place < len(data) else _END
        place += 1
        if marker == 0 or marker in _WITHOUT_LENGTH:
            continue
        if marker in _FRAMES and place + 7 <= len(data):
            height, width = struct.unpack_from(">HH", data, place + 3)
            return width, height
        if marker in (_SCAN, _END) or place + 2 > len(data):
            break
        place += max(2, int.from_bytes(data[place : place + 2], "big"))
    raise _damaged()


def _size_of_png(data: bytes) -> tuple[int, int]:
    """Return width and height of a PNG (ISO/IEC 15948, 5.3 and 11.2.2) with one image."""
    place, size = len(_PNG), None
    while place + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        is_first = place == len(_PNG)
        if (kind == b"IHDR") != is_first or (is_first and (length != 13 or len(data) < 33)):
            break
        if is_first:
            size = struct.unpack_from(">II", data, place + 8)
        if kind == b"acTL":
            raise BadImage("an animated PNG: expected a single image")
        if kind == b"IDAT" and size is not None:
            return size[0], size[1]
        place += 12 + length
    raise _damaged()


def _size_of_bmp(data: bytes) -> tuple[int, int]:
    """Return width and height of a BMP with a BITMAPINFOHEADER or a later one."""
    if len(data) < 26 or int.from_bytes(data[14:18], "little") < 40:
        raise _damaged()
    width, height = struct.unpack_from("<ii", data, 18)
    return max(0, width), abs(height)  # a negative height: from top to bottom


def _size_of_webp(data: bytes) -> tuple[int, int]:
    """Return width and height of a WebP (RFC 9649, 2.5 to 2.7) with one image."""
    kind = data[8:16]
    if len(data) < 30:
        raise _damaged()
    if kind == b"WEBPVP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"WEBPVP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind != b"WEBPVP8X":
        raise _damaged()
    if data[20] & _ANIMATED:
        raise BadImage("an animated WebP: expected a single image")
    width, height = (int.from_bytes(data[place : place + 3], "little") for place in (24, 27))
    return width + 1, height + 1


@contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    """Yield the fully decoded Pillow image; every failure to decode becomes BadImage."""
    header = image_header(data)
    try:
        with warnings.catch_warnings():
            # Our own, documented limit has been checked.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))
            _check_size(image, header)
            image.load()
    except PacelineError:
        raise
    except UnidentifiedImageError:
        raise _damaged() from None
    except Exception as error:  # noqa: BLE001  (Pillow's decoders raise almost anything)
        raise BadImage(f"damaged: {str(error) or type(error).__name__}") from None
    with image:
        yield image


def _check_size(image: Image.Image, header: ImageHeader) -> None:
    if image.size != (header.width, header.height):
        raise BadImage(f"damaged: two sizes, {header.width}x{header.height} and {image.size}")


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
