"""The manifest of a data set: its fields and files, in which order, with checksums.

The file is `_paceline_manifest.json` in the data set's folder, or in a folder of its own that names
the location of the data. Parquet readers ignore names that begin with an underscore.
"""

from __future__ import annotations

import io
import math
import zipfile
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import accumulate
from typing import IO, Any, Literal, Self, get_args

import numpy as np
import pyarrow as pa
from numpy.lib import format as npy
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic import Field as Value

from paceline.base.errors import DataError
from paceline.plan.spec.sentences import first_of
from paceline.train.data.images import MAX_BYTES, decode

# --- fields of a data set: how their values are stored, and which arrays they become -------------
#
# A field is a Parquet column that training can use. Petastorm keeps its own description of fields
# as a pickle, which Paceline never opens. So a field is described by the Parquet schema and the
# first bytes of its values: NumPy files (Petastorm's NdarrayCodec and CompressedNdarrayCodec) and
# images have signatures.

Codec = Literal["scalar", "list", "image", "other_image", "array", "compressed_array"]
CODECS: tuple[str, ...] = get_args(Codec)
_ENCODED = ("image", "other_image", "array", "compressed_array")
_IMAGES = ("image", "other_image")  # JPEG and PNG; with BMP and WebP, only if the user says so
_COMPRESSED_NAME = "arr"  # of the array in what CompressedNdarrayCodec writes
NUMBERS = "biuf"  # kinds of NumPy's types: truth values and numbers
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
        if math.prod(self.shape) * kind.itemsize > MAX_BYTES:
            raise ValueError(
                f"field {self.name!r}: expected values of at most {MAX_BYTES} bytes, "
                f"got {self.shape} of {self.dtype}"
            )
        return self

    def value_shape(self, image_size: int) -> tuple[int, ...]:
        """Return the shape of a decoded value."""
        return (image_size, image_size, 3) if self.codec in _IMAGES else self.shape

    @property
    def is_encoded(self) -> bool:
        """Return whether each value is stored as bytes that must be decoded."""
        return self.codec in _ENCODED

    def describe(self) -> str:
        """Return `name (float32, 3x4)`."""
        kind = "image" if self.codec in _IMAGES else self.dtype
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
        "bytes of an unknown kind; expected a NumPy file, a JPEG or PNG image; for BMP and WebP, "
        "state --codec NAME=other_image"
    )


def _encoded_field(name: str, value: bytes, codec: str) -> Field:
    if codec in _IMAGES:
        try:
            decode(value, 1, others=codec == "other_image")
        except DataError as error:
            raise UnusableField(str(error)) from None
        return Field.model_validate({"name": name, "codec": codec, "dtype": "uint8"})
    if codec not in _ENCODED:
        raise UnusableField(f"codec {codec}: expected one of {', '.join(_ENCODED)} for bytes")
    array = _load_array(value, codec, None)
    return Field.model_validate(
        {"name": name, "codec": codec, "dtype": str(array.dtype), "shape": array.shape}
    )


def _decoded(field: Field, value: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    if not isinstance(value, bytes):
        raise UnusableField(f"field {field.name}: a value is missing (null)")
    if field.codec in _IMAGES:
        return decode(value, shape[0], others=field.codec == "other_image")
    return _load_array(value, field.codec, field)


def _load_array(value: bytes, codec: str, field: Field | None) -> NDArray[Any]:
    """Return the array in the bytes of a NumPy file. It never unpickles anything.

    field: what its header must say. Memory is allocated only after the header has been checked.
    """
    try:
        if codec == "array":
            return _read_array(io.BytesIO(value), len(value), field)
        archive = zipfile.ZipFile(io.BytesIO(value))
        member = _member(archive)
        with archive, archive.open(member) as stream:
            return _read_array(stream, member.file_size, field)
    except UnusableField:
        raise
    except Exception as error:  # noqa: BLE001  (zipfile and NumPy raise almost anything)
        raise UnusableField(f"not a NumPy file with an array of numbers: {error}") from None


def _member(archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    """Return the entry of the array. LZMA could ask for a dictionary of any size."""
    member = archive.getinfo(f"{_COMPRESSED_NAME}.npy")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UnusableField("not a NumPy file: expected no other compression than deflate")
    return member


def _read_array(stream: IO[bytes], file_bytes: int, field: Field | None) -> NDArray[Any]:
    """Return the array in a stream of `file_bytes` (numpy.lib.format, versions 1 and 2)."""
    version = npy.read_magic(stream)  # type: ignore[no-untyped-call]
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, by_column, dtype = read_header(stream)  # type: ignore[no-untyped-call]
    if dtype.kind not in NUMBERS:
        raise UnusableField("not a NumPy file with an array of numbers")
    size = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or size > min(MAX_BYTES, file_bytes - stream.tell()):
        raise UnusableField(
            f"not a NumPy file: an array of shape {shape} and {dtype} in a file of {file_bytes} "
            f"bytes; expected at most {MAX_BYTES} bytes, and not more than the file has"
        )
    if field is not None and (shape != field.shape or str(dtype) != field.dtype):
        raise UnusableField(
            f"field {field.name}: expected arrays of {field.dtype} and shape {field.shape}, got "
            f"{dtype} and {shape}; give all arrays of the field the same shape"
        )
    content = stream.read(size)
    return np.frombuffer(content, dtype).reshape(shape, order="F" if by_column else "C")


MANIFEST_NAME = "_paceline_manifest.json"
SCHEMA_VERSION = 2
_MOST_CLASSES = 5  # named in a summary


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataFile(_Model):
    """A Parquet file of the data set."""

    path: str  # relative to the location of the data set
    row_group_rows: tuple[int, ...] = Value(min_length=1)
    size_bytes: int
    sha256: str = Value(pattern="^[0-9a-f]{64}$")  # also the name of copies


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group of the data set; its samples have consecutive ids."""

    file: DataFile
    number: int  # in its file
    rows: int
    first_sample_id: int


class SkippedImage(_Model):
    """An image that ingest left out, and the reason."""

    path: str
    reason: str


class ImageStats(_Model):
    """Sizes of the images of a data set; sides are those of the upright images, in pixels."""

    total_bytes: int
    mean_bytes: int
    width_min: int
    width_max: int
    height_min: int
    height_max: int
    reencoded: int  # images that are not stored verbatim


class DatasetManifest(_Model):
    """Everything about a data set except its samples.

    The values from `classes` to `skipped` are known only of data sets that `paceline data ingest`
    wrote.
    """

    schema_version: int = Value(default=SCHEMA_VERSION, alias="schema")
    location: str | None = None  # folder or URL of the files; None: the manifest's own folder
    fields: tuple[Field, ...]
    ignored: dict[str, str] = {}  # columns that are no fields, and the reasons
    id_field: str | None = None  # column whose values must be the sample ids
    samples: int
    files: tuple[DataFile, ...] = Value(min_length=1)
    classes: tuple[str, ...] = ()  # label i is classes[i]
    class_counts: tuple[int, ...] = ()
    seed: int | None = None  # of the order in which the samples are stored
    content_sha256: str | None = None  # over (sample id, label, sha256 of the image) in order
    image_stats: ImageStats | None = None
    skipped: tuple[SkippedImage, ...] = ()
    versions: dict[str, str]
    created: str = Value(default_factory=_now)  # ISO 8601, UTC

    @cached_property
    def row_groups(self) -> tuple[RowGroup, ...]:
        """All row groups in order."""
        places = [(f, n, rows) for f in self.files for n, rows in enumerate(f.row_group_rows)]
        firsts = accumulate((rows for *_, rows in places), initial=0)
        return tuple(RowGroup(*place, first) for place, first in zip(places, firsts, strict=False))

    @property
    def summary(self) -> str:
        """The content in one line, for example `60 images, 2 classes (a 30, b 30)`."""
        parts = [f"{self.samples} {'samples' if self.image_stats is None else 'images'}"]
        if self.classes:
            counts = zip(self.classes, self.class_counts, strict=True)
            listed = first_of([f"{name} {count}" for name, count in counts], _MOST_CLASSES)
            parts.append(f"{len(self.classes)} classes ({listed})")
        if self.image_stats is not None and self.image_stats.reencoded:
            parts.append(f"{self.image_stats.reencoded} re-encoded")
        if self.skipped:
            parts.append(f"{len(self.skipped)} skipped")
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Return the document that `from_json` reads."""
        return self.model_dump(mode="json", by_alias=True)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for file in self.files:
            *folders, name = file.path.split("/")  # there may be many files: a Path takes long
            if "" in folders or ".." in folders or not name or name[0] in "._":
                raise ValueError(f"file {file.path!r} is not a path within the data set")
            if min(file.row_group_rows) < 1:
                raise ValueError(f"file {file.path!r} has a row group without rows")
        in_files = sum(sum(file.row_group_rows) for file in self.files)
        in_classes = sum(self.class_counts) if self.classes else self.samples
        if not in_files == self.samples == in_classes:
            raise ValueError(
                "expected files and classes to contain the same samples, got "
                f"{in_files} in files, {in_classes} in classes, {self.samples} in total"
            )
        if len(self.classes) != len(self.class_counts):
            raise ValueError(f"{len(self.classes)} classes, but {len(self.class_counts)} counts")
        return self


def image_fields(classes: int) -> tuple[Field, ...]:
    """Return the fields of a data set that `paceline data ingest` writes."""
    return (
        Field(name="image", codec="image", dtype="uint8"),
        Field(name="label", codec="scalar", dtype="int32", classes=classes),
        Field(name="sample_id", codec="scalar", dtype="int64"),
    )


def from_json(document: dict[str, Any], where: str) -> DatasetManifest:
    """Return the manifest in `document`. Raises DataError with `where` and what is wrong."""
    version = document.get("schema")
    if version != SCHEMA_VERSION:
        raise DataError(
            f"{where}: expected manifest schema {SCHEMA_VERSION}, got {version!r}: it is of "
            "another version of Paceline; make it again with `paceline data ingest` or "
            "`paceline data register` of this version"
        )
    try:
        return DatasetManifest.model_validate(document)
    except ValidationError as error:
        faults = "; ".join(
            ": ".join(filter(None, (".".join(map(str, fault["loc"])), fault["msg"])))
            for fault in error.errors()
        )
        raise DataError(f"{where}: not a valid manifest of a Paceline data set: {faults}") from None
