"""Fields of a data set: how their values are stored, and which arrays they become.

A field is a Parquet column that training can use. Petastorm keeps its own description of fields as
a pickle, which Paceline never opens. So a field is described by the Parquet schema and the first
bytes of its values: NumPy files (Petastorm's NdarrayCodec and CompressedNdarrayCodec) and images
have signatures.
"""

from __future__ import annotations

import io
import math
import zipfile
from concurrent.futures import Executor
from typing import Any, Literal, Self, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, model_validator

from paceline.base.errors import DataError
from paceline.train.data.images import decode

Codec = Literal["scalar", "list", "image", "array", "compressed_array"]
CODECS: tuple[str, ...] = get_args(Codec)
_ENCODED = ("image", "array", "compressed_array")
_COMPRESSED_NAME = "arr"  # of the array in what CompressedNdarrayCodec writes
NUMBERS = "biuf"  # kinds of NumPy's types: truth values and numbers
_LARGEST_VALUE_BYTES = 1 << 30
_SIGNATURES = {
    b"\x93NUMPY": "array",
    b"PK\x03\x04": "compressed_array",
    b"\xff\xd8\xff": "image",
    b"\x89PNG\r\n\x1a\n": "image",
}


class UnusableField(DataError):  # noqa: N818  (reads as the sentence the user sees)
    """A column that training cannot use; the message gives the reason, without the name."""


class Field(BaseModel):
    """A column and its values.

    dtype, shape: of one value when decoded; the shape of an image is () here, because it depends on
    the image size of the training. classes: integer values are 0 .. classes - 1; None if they are
    no classes, or if it is not known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    codec: Codec
    dtype: str
    shape: tuple[int, ...] = ()
    classes: int | None = None

    @model_validator(mode="after")
    def _is_allocatable(self) -> Self:
        """Refuse what no array can have: the values come from a file of somebody else."""
        try:
            kind = np.dtype(self.dtype)
        except (TypeError, ValueError, SyntaxError) as error:
            raise ValueError(f"field {self.name!r}: expected a type of NumPy: {error}") from error
        if kind.kind not in NUMBERS:
            raise ValueError(f"field {self.name!r}: expected numbers, got type {self.dtype!r}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"field {self.name!r}: expected sizes of 0 or more, got {self.shape}")
        if math.prod(self.shape) * kind.itemsize > _LARGEST_VALUE_BYTES:
            raise ValueError(
                f"field {self.name!r}: expected values of at most {_LARGEST_VALUE_BYTES} bytes, "
                f"got {self.shape} of {self.dtype}"
            )
        return self

    def value_shape(self, image_size: int) -> tuple[int, ...]:
        """Return the shape of a decoded value."""
        return (image_size, image_size, 3) if self.codec == "image" else self.shape

    @property
    def is_encoded(self) -> bool:
        """Return whether each value is stored as bytes that must be decoded."""
        return self.codec in _ENCODED

    def describe(self) -> str:
        """Return `name (float32, 3x4)`."""
        kind = "image" if self.codec == "image" else self.dtype
        shape = "x".join(map(str, self.shape))
        return f"{self.name} ({kind}{', ' if shape else ''}{shape})"


def field_of(name: str, column: pa.ChunkedArray, codec: str | None = None) -> Field:
    """Return the field of some values of a column.

    codec: as the user states it; None derives it from the values. Raises UnusableField.
    """
    kind, example = column.type, column[0].as_py() if len(column) else None
    if example is None:
        raise UnusableField("the first value is missing (null)")
    if pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return _encoded_field(name, example, codec or _codec_of(example))
    if codec not in (None, "list" if pa.types.is_list(kind) else "scalar"):
        raise UnusableField(f"codec {codec}: expected a column of bytes, got {kind}")
    if pa.types.is_list(kind):
        return Field(name=name, codec="list", dtype=_dtype(kind.value_type), shape=(len(example),))
    return Field(name=name, codec="scalar", dtype=_dtype(kind))


def decode_column(field: Field, stored: NDArray[Any], out: NDArray[Any], pool: Executor) -> None:
    """Write the decoded values of a column to `out`, of shape (n, *value_shape).

    pool: executes the decoding of single values. Raises DataError for a value that is not as the
    field describes it.
    """
    if not field.is_encoded:
        out[...] = stored
        return
    if field.codec == "array" and _decode_at_once(field, stored, out):
        return

    def place(row: int) -> None:
        out[row] = _decoded(field, stored[row], out.shape[1:])

    list(pool.map(place, range(len(stored))))


def _decode_at_once(field: Field, stored: NDArray[Any], out: NDArray[Any]) -> bool:
    """Decode NumPy files that all have the same header; return whether they do.

    It takes about 1 µs for an array of 64 bytes; NumPy needs 90 µs to read each file (AMD EPYC).
    """
    sizes = {len(value) if isinstance(value, bytes) else -1 for value in stored}
    if len(sizes) != 1 or -1 in sizes:
        return False
    first = _decoded(field, stored[0], out.shape[1:])
    if not first.flags.c_contiguous:  # column by column
        return False
    files = np.frombuffer(b"".join(stored), np.uint8).reshape(len(stored), -1)
    header_bytes = files.shape[1] - first.nbytes
    if (files[:, :header_bytes] != files[0, :header_bytes]).any():
        return False
    values = np.ascontiguousarray(files[:, header_bytes:]).view(first.dtype)
    out[...] = values.reshape(len(stored), *field.shape)
    return True


def delivered_dtype(dtype: str, *, is_target: bool) -> np.dtype[Any]:
    """Return the type in which values are delivered to a training.

    Floating-point numbers become float32, and integers of targets int64, as losses need them.
    """
    given = np.dtype(dtype)
    if given.kind == "f":
        return np.dtype(np.float32)
    return np.dtype(np.int64) if is_target and given.kind in "iu" else given


def _dtype(kind: pa.DataType) -> str:
    # Petastorm has no uint64, and skips such a column.
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if not is_number or pa.types.is_uint64(kind):
        raise UnusableField(
            f"values of type {kind}; expected numbers, lists of numbers (list<…>), NumPy arrays or "
            "images"
        )
    return str(np.dtype(kind.to_pandas_dtype()))


def _codec_of(value: bytes) -> str:
    for signature, codec in _SIGNATURES.items():
        if value.startswith(signature):
            return codec
    raise UnusableField(
        "bytes of an unknown kind; expected a NumPy file, a JPEG or PNG image; for another image "
        "format, state it with --codec NAME=image"
    )


def _encoded_field(name: str, value: bytes, codec: str) -> Field:
    if codec == "image":
        try:
            decode(value, 1)
        except DataError as error:
            raise UnusableField(str(error)) from None
        return Field(name=name, codec="image", dtype="uint8")
    if codec not in _ENCODED:
        raise UnusableField(f"codec {codec}: expected one of {', '.join(_ENCODED)} for bytes")
    array = _load_array(value, codec)
    return Field.model_validate(
        {"name": name, "codec": codec, "dtype": str(array.dtype), "shape": array.shape}
    )


def _decoded(field: Field, value: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    if not isinstance(value, bytes):
        raise UnusableField(f"field {field.name}: a value is missing (null)")
    if field.codec == "image":
        return decode(value, shape[0])
    array = _load_array(value, field.codec)
    if array.shape != field.shape or str(array.dtype) != field.dtype:
        raise UnusableField(
            f"field {field.name}: expected arrays of {field.dtype} and shape {field.shape}, got "
            f"{array.dtype} and {array.shape}; give all arrays of the field the same shape"
        )
    return array


def _load_array(value: bytes, codec: str) -> NDArray[Any]:
    """Return the array in the bytes of a NumPy file. It never unpickles anything."""
    try:
        loaded = np.load(io.BytesIO(value), allow_pickle=False)
        array = loaded if codec == "array" else loaded[_COMPRESSED_NAME]
    except (ValueError, KeyError, OSError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise UnusableField(f"not a NumPy file with an array of numbers: {error}") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in NUMBERS:
        raise UnusableField("not a NumPy file with an array of numbers")
    return array
