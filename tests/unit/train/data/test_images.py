"""Images: bad ones are told apart, odd ones made uniform, pixels come out as documented."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.train.data.images import BadImage, decode, inspect, normalise


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def picture(width: int = 60, height: int = 40) -> Image.Image:
    """Left half red, right half blue."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 2, 0] = 255
    pixels[:, width // 2 :, 2] = 255
    return Image.fromarray(pixels)


JPEG = encoded(picture(), quality=90)


@pytest.mark.parametrize(
    "data", [JPEG, encoded(picture(), "PNG"), encoded(picture(), progressive=True)]
)
def test_upright_rgb_is_kept_byte_for_byte(data: bytes) -> None:
    stored, info = normalise(data)
    assert stored is data
    assert (info.width, info.height, info.verbatim) == (60, 40, True)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"hello, this is text", "not an image"),
        (JPEG[: len(JPEG) // 2], "damaged"),
        (JPEG[:-40], "damaged"),
        (encoded(picture(), "PNG")[:80], "damaged"),
        (encoded(picture(), "GIF"), "a GIF image"),
        (encoded(picture(), "BMP"), "a BMP image"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "damaged"),
    ],
)
def test_a_bad_image_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    for judge in (inspect, normalise):
        with pytest.raises(BadImage, match=reason):
            judge(data)


@pytest.mark.parametrize("progressive", [False, True])
def test_hundred_truncated_jpegs_are_all_refused(progressive: bool) -> None:
    """A changed bit within the pixels may give another valid image: the checksum detects it, see
    test_a_damaged_page_of_any_column_is_detected in test_reading.py."""
    noise = np.random.default_rng(14).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    whole = encoded(Image.fromarray(noise), quality=90, progressive=progressive)
    inspect(whole)
    lengths = random.Random(14).sample(range(1, len(whole)), 100)
    for length in (*lengths, len(whole) - 1):
        with pytest.raises(BadImage, match=r"damaged|not an image"):
            inspect(whole[:length])


def chunk(kind: bytes, data: bytes) -> bytes:
    """A PNG chunk (ISO/IEC 15948, 5.3)."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, rows: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [14000, 60000])
def test_a_decompression_bomb_is_refused_before_it_is_unpacked(side: int) -> None:
    with pytest.raises(BadImage, match="decompression bomb"):
        inspect(png(side, side, 8, b""))


def rgba(alpha: int) -> Image.Image:
    image = picture().convert("RGBA")
    image.putalpha(alpha)
    return image


# Made by hand: Pillow does not write 16-bit RGB.
RED_16_BIT = png(8, 4, 16, (b"\0" + b"\xff\xff\0\0\0\0" * 8) * 4)


@pytest.mark.parametrize(
    ("data", "left"),
    [
        (encoded(picture().convert("L")), (76, 76, 76)),
        (encoded(picture().convert("CMYK")), (254, 0, 0)),
        (encoded(picture().convert("P"), "PNG"), (255, 0, 0)),
        (encoded(rgba(255), "PNG"), (255, 0, 0)),
        (encoded(rgba(0), "PNG"), (255, 255, 255)),
        (encoded(Image.fromarray(np.full((40, 60), 0x8000, np.uint16)), "PNG"), (128, 128, 128)),
        (encoded(picture().convert("1"), "PNG"), None),
        (encoded(picture().convert("LA"), "PNG"), (76, 76, 76)),
        (RED_16_BIT, (255, 0, 0)),
    ],
    ids=["grey", "cmyk", "palette", "opaque", "transparent", "grey16", "bits", "grey+a", "rgb16"],
)
def test_odd_modes_become_rgb_jpeg(data: bytes, left: tuple[int, int, int] | None) -> None:
    stored, info = normalise(data)
    assert not info.verbatim
    with Image.open(io.BytesIO(stored)) as image:
        assert (image.format, image.mode) == ("JPEG", "RGB")
        assert image.size == (info.width, info.height)
        if left is not None:
            assert np.allclose(np.asarray(image)[2, 1], left, atol=6)
    again, settled = normalise(stored)
    assert again is stored
    assert settled.verbatim


@pytest.mark.parametrize(
    ("orientation", "size", "red"),  # where the red half comes to lie (EXIF 2.3, Orientation)
    [
        (2, (60, 40), "right"), (3, (60, 40), "right"), (4, (60, 40), "left"),
        (5, (40, 60), "top"), (6, (40, 60), "top"), (7, (40, 60), "bottom"),
        (8, (40, 60), "bottom"),
    ],
)  # fmt: skip
def test_rotated_images_are_set_upright(orientation: int, size: tuple[int, int], red: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored, info = normalise(encoded(picture(), exif=exif))
    assert (info.width, info.height) == size
    with Image.open(io.BytesIO(stored)) as image:
        assert image.size == size
        assert image.getexif().get(0x0112, 1) == 1
        pixels = np.asarray(image)
    where = {
        "left": pixels[size[1] // 2, 3], "right": pixels[size[1] // 2, -4],
        "top": pixels[3, size[0] // 2], "bottom": pixels[-4, size[0] // 2],
    }  # fmt: skip
    assert np.allclose(where[red], (255, 0, 0), atol=12)


def test_decode_scales_the_shorter_side_and_cuts_the_centre() -> None:
    pixels = np.zeros((80, 240, 3), np.uint8)
    pixels[:, 80:160] = (10, 200, 30)  # the middle third is the centre square
    image = decode(encoded(Image.fromarray(pixels), "PNG"), 40)
    assert image.shape == (40, 40, 3)
    assert image.dtype == np.uint8
    assert np.array_equal(image, np.broadcast_to((10, 200, 30), (40, 40, 3)))


@pytest.mark.parametrize("size", [(33, 50), (50, 33), (64, 64), (20, 900), (1, 1), (1000, 777)])
@pytest.mark.parametrize("target", [1, 32, 64])
def test_decode_gives_the_asked_size_whatever_comes(size: tuple[int, int], target: int) -> None:
    assert decode(encoded(picture(*size)), target).shape == (target, target, 3)


@pytest.mark.parametrize("side", [100, 128, 200, 256, 400, 511, 512, 520])
def test_reduced_decoding_differs_little_from_full_decoding(side: int) -> None:
    """OpenCV's scaled JPEG decoding against Pillow's box filter over the whole picture."""
    rng = np.random.default_rng(side)
    coarse = Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8))
    whole = coarse.resize((side, side), Image.Resampling.BICUBIC)
    ours = decode(encoded(whole, quality=95, subsampling=0), 64).astype(int)
    theirs = np.asarray(whole.resize((64, 64), Image.Resampling.BOX)).astype(int)
    assert np.abs(ours - theirs).mean() < 2.0


def test_decode_of_garbage_is_a_bad_image() -> None:
    with pytest.raises(BadImage):
        decode(b"\xff\xd8 nothing more", 10)
