"""Values of a data set that somebody made to harm its reader reach no decoder."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest
from PIL import Image

from paceline.base.errors import DataError
from paceline.train.data.images import MAX_PIXELS, BadImage, decode, image_header
from paceline.train.data.manifest import Field, decode_column, field_of
from paceline.train.data.masks import read_mask

SIDE = 64


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(*chunks: bytes, width: int = SIDE, height: int = SIDE) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IEND", b"")


def image(extension: str) -> bytes:
    pixels = np.arange(SIDE * SIDE * 3, dtype=np.uint8).reshape(SIDE, SIDE, 3)
    found, data = cv2.imencode(extension, pixels)
    assert found
    return bytes(data)


ROWS = chunk(b"IDAT", zlib.compress(bytes((SIDE * 3 + 1) * SIDE)))
BOMB = png(chunk(b"IDAT", zlib.compress(bytes(64))), width=30_000, height=30_000)
CRAFTED = {
    "jpeg 2000": image(".jp2"),
    "jpeg 2000 codestream": b"\xff\x4f\xff\x51" + bytes(100),
    "tiff": image(".tiff"),
    "webp": image(".webp"),
    "bmp": image(".bmp"),
    "ppm": image(".ppm"),
    "png of 900 million pixels": BOMB,
    "jpeg of 4 thousand million pixels": (
        b"\xff\xd8\xff\xc2\x00\x11\x08" + struct.pack(">HH", 65535, 65535) + bytes(40)
    ),
    "animated png": png(chunk(b"acTL", struct.pack(">II", 2, 0)), ROWS),
    "png with two headers": png(
        chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)), ROWS
    ),
    "png whose header is not first": png()[:8] + ROWS + png()[8:],
    "jpeg without a frame": b"\xff\xd8\xff\xda\x00\x02",
}


@pytest.mark.parametrize("data", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_image_reaches_no_decoder(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def decoder(*_: object, **__: object) -> None:
        raise AssertionError("a decoder saw the bytes")

    monkeypatch.setattr(cv2, "imdecode", decoder)
    monkeypatch.setattr(Image, "open", decoder)
    readers: list[Callable[[bytes, int], object]] = [decode, read_mask]
    for read in readers:
        with pytest.raises(BadImage):
            read(data, SIDE)


@pytest.mark.parametrize("extension", [".bmp", ".webp"])
def test_others_are_decoded_only_if_asked(extension: str) -> None:
    data = image(extension)
    assert decode(data, SIDE, others=True).shape == (SIDE, SIDE, 3)
    with pytest.raises(BadImage, match="expected JPEG or PNG"):
        decode(data, SIDE)


@pytest.mark.parametrize(
    "data",
    [
        b"BM" + bytes(12) + struct.pack("<Iii", 40, 60_000, -60_000) + bytes(40),
        b"RIFF" + bytes(4) + b"WEBPVP8X" + bytes(8) + b"\xff" * 6 + bytes(40),
        b"RIFF" + bytes(4) + b"WEBPVP8X" + bytes(4) + b"\x02" + bytes(40),
        image(".jp2"),
        image(".tiff"),
    ],
    ids=["bmp bomb", "webp bomb", "animated webp", "jpeg 2000", "tiff"],
)
def test_crafted_others_are_refused_even_if_asked(data: bytes) -> None:
    with pytest.raises(BadImage):
        image_header(data, others=True)


@pytest.mark.parametrize("size", [(1, 1), (17, 5), (640, 480)])
@pytest.mark.parametrize("progressive", [False, True])
def test_the_header_says_what_the_decoder_finds(size: tuple[int, int], progressive: bool) -> None:
    for kind, options in (("JPEG", {"progressive": progressive}), ("PNG", {})):
        stream = io.BytesIO()
        Image.new("RGB", size).save(stream, kind, **options)
        header = image_header(stream.getvalue())
        assert (header.format, header.width, header.height) == (kind, *size)


def test_a_thin_image_does_not_become_a_huge_one() -> None:
    """One row of 60,000 pixels, scaled to 224 rows, would have 3,010,560,000 pixels."""
    stream = io.BytesIO()
    Image.new("L", (60_000, 1)).save(stream, "PNG")
    for read in (decode, read_mask):
        with pytest.raises(BadImage, match=f"expected at most {MAX_PIXELS}; crop"):
            read(stream.getvalue(), 224)


def npz(array: bytes, name: str = "arr.npy", compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        archive.writestr(name, array)
    return stream.getvalue()


def npy(shape: str, content: bytes = b"", dtype: str = "|u1") -> bytes:
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(header) + 1) + header + b"\n" + content


LARGE = 64 << 20
ARRAYS = {
    "claims 8 GB": npz(npy("(8000000000,)")),
    "claims more than numbers can count": npz(npy("(2, 9223372036854775807)")),
    "larger than the field": npz(npy(f"({LARGE},)", bytes(LARGE))),
    "another compression": npz(npy("(4,)", bytes(4)), compression=zipfile.ZIP_LZMA),
    "nested header": npz(npy("(" * 5000)),
    "objects": npz(npy("(4,)", bytes(64), "|O")),
    "another name": npz(npy("(4,)", bytes(4)), name="other.npy"),
    "negative": npz(npy("(-4,)", bytes(4))),
    "cut off": npz(npy("(4,)", bytes(2))),
    "no archive": b"PK\x03\x04" + bytes(60),
}


@pytest.mark.parametrize("value", ARRAYS.values(), ids=ARRAYS)
def test_a_crafted_array_is_refused_before_it_is_unpacked(value: bytes) -> None:
    field = Field(name="x", codec="compressed_array", dtype="uint8", shape=(4,))
    stored, out = np.array([value], object), np.zeros((1, 4), np.uint8)
    tracemalloc.start()
    try:
        with ThreadPoolExecutor(1) as pool, pytest.raises(DataError):
            decode_column(field, stored, out, pool)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def test_an_array_by_column_is_read_right() -> None:
    array = np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4))
    stream = io.BytesIO()
    np.savez_compressed(stream, arr=array)
    field = Field(name="x", codec="compressed_array", dtype="float32", shape=(3, 4))
    out = np.zeros((1, 3, 4), np.float32)
    with ThreadPoolExecutor(1) as pool:
        decode_column(field, np.array([stream.getvalue()], object), out, pool)
    assert np.array_equal(out[0], array)


def test_a_bomb_takes_little_memory() -> None:
    """In a process of its own, whose peak the kernel tells."""
    program = (
        "import resource, sys\n"
        "from paceline.train.data.images import decode\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    decode(sys.stdin.buffer.read(), 8)\nexcept Exception:\n    pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=BOMB, capture_output=True, check=True, timeout=60
    )
    grown_mib = int(done.stdout) / 1024  # ru_maxrss is in KiB
    assert grown_mib < 100


def test_field_of_refuses_an_array_that_its_file_has_not() -> None:
    import pyarrow as pa

    with pytest.raises(DataError, match="not more than the file has"):
        field_of("x", pa.chunked_array([pa.array([npy("(1000,)", bytes(4))])]))
