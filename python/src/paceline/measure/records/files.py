"""Append-only JSON lines, atomic JSON documents, and both read as the dataclasses that wrote them.

Unknown fields are ignored. A missing field, or a nested value of the wrong shape, raises an error
that names the file.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import tempfile
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TextIO, TypeVar, cast

import pydantic_core
from pydantic import TypeAdapter, ValidationError

from paceline.base.errors import DataError
from paceline.base.host.files import NO_FILE, open_regular

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class JsonlWriter:
    """Appends one JSON object per line and writes each to the kernel at once.

    The rows survive the death of the process, but not of the machine: an fsync per row would be
    part of the measured time.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def write(self, row: object) -> None:
        """Append `row`, a dataclass instance or a mapping."""
        self.write_all((row,))

    def write_all(self, rows: Iterable[object]) -> None:
        """Append `rows` with one write."""
        rest = memoryview("".join(f"{_encode(row)}\n" for row in rows).encode())
        while rest:  # a full disk may accept a part of a row; then the next write fails
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fields_of(value: object) -> dict[str, Any]:
    """Return the fields of a dataclass for its JSON row. Raises TypeError for another value.

    dataclasses.asdict copies everything, which takes twice as long as writing it.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: getattr(value, name) for name in _field_names(type(value))}
    raise TypeError(f"expected a dataclass or a JSON value, got {type(value).__name__}")


@cache
def _field_names(kind: type[DataclassInstance]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


_encode = json.JSONEncoder(separators=(",", ":"), default=fields_of).encode


FieldTypes = Mapping[str, tuple[type, ...]]  # by name, in JSON
_LONGEST_LINE = (
    1 << 28
)  # bytes; a row has some kilobytes, and one of many operations some megabytes


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of `path` in order; an unfinished last row is skipped.

    Raises DataError that names the line if another line is not a JSON object.
    """
    with _opened(path) as file:
        for number in itertools.count(1):
            line = file.readline(_LONGEST_LINE)
            if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                return  # the writer was killed while it wrote this row
            yield json_row(line, f"{path}:{number}")


def content_of(path: Path) -> bytes:
    """Return the content of a file of a run. Raises FileNotFoundError, DataError if it is a folder
    or something else, and OSError if it cannot be read."""
    with _opened(path) as file:
        return file.read()


def ends_of(path: Path, last_bytes: int) -> tuple[bytes, bytes]:
    """Return the first line of a file of a run and at most so many of its last bytes after it.

    Raises as `content_of`.
    """
    with _opened(path) as file:
        first = file.readline(_LONGEST_LINE)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(len(first), size - last_bytes))
        return first, file.read()


def text_of(path: Path) -> str:
    """Return the content of a file of a run as text, with a mark for bytes that are not.

    Raises as `content_of`.
    """
    return content_of(path).decode("utf-8", errors="replace")


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        if error.errno in NO_FILE:
            raise DataError(f"{path}: expected a file of the run: {error.strerror}") from error
        raise


def json_row(line: bytes, place: str) -> dict[str, Any]:
    """Return the row of a line. Raises DataError that names its place if it is no JSON object."""
    return json_object(line, place, "one JSON object a line")


def json_object(content: bytes, place: str, expected: str = "a JSON object") -> dict[str, Any]:
    """Parse a JSON object. Raises DataError that names its place if it is not one, or has a text
    or a number that no writer of Paceline's produces."""
    try:
        found = json.loads(content.decode("utf-8"))
        _check_values(found)
    except (ValueError, RecursionError) as error:  # nested 1,000 deep and more
        raise DataError(f"{place}: expected {expected}: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{place}: expected a JSON object, got {found!r:.50}")
    return found


LONGEST_S = 1e11  # of a duration, and since 1970: in the year 5138
# Loss values may be infinite, or no number.
LARGEST = 1e100  # squares of it, and sums of them, are still numbers
_MOST_INTEGER = 2**63  # of a column of Polars


def _check_values(document: object) -> None:
    """Raise ValueError for a value that no writer of Paceline's produces."""
    left: list[tuple[str, object]] = [("", document)]
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += ((name, each) for each in value)
        elif fault := _fault_of(name, value):
            raise ValueError(f"{name}: {fault}")
        if not name.isascii():
            _check_text(name)


def _fault_of(name: str, value: object) -> str | None:
    if isinstance(value, str):
        if not value.isascii():
            _check_text(value)
    elif isinstance(value, int) and not -_MOST_INTEGER <= value < _MOST_INTEGER:
        return "expected an integer of at most 64 bits"
    elif isinstance(value, int | float) and is_time(name) and not is_seconds(name, value):
        return f"expected seconds, got {value:g}"
    elif isinstance(value, float) and LARGEST < abs(value) < math.inf:
        return f"expected a number up to {LARGEST:g}, got {value:g}"
    return None


def is_time(name: str) -> bool:
    """Return whether a field has seconds: its name ends with the unit, and is no rate."""
    return name.endswith("_s") and not name.endswith("_per_s")


def is_seconds(name: str, value: Any) -> Any:
    """Return whether a time, or each one of a Polars column, is possible."""
    least = 0.0 if name.endswith("unix_s") else -LONGEST_S
    return (value >= least) & (value <= LONGEST_S)


def check_types(fields: object, types_of: FieldTypes, place: str) -> dict[str, Any]:
    """Return an object of JSON. Raises DataError that names its place if it is none, or one of
    these fields has a value of another type. Fields may be missing."""
    if not isinstance(fields, dict):
        raise DataError(f"{place}: expected a JSON object, got {fields!r:.50}")
    for name, types in types_of.items():
        value = fields.get(name)
        if name in fields and not _is_one_of(value, types):
            names = " or ".join("null" if each is NoneType else each.__name__ for each in types)
            raise DataError(f"{place}: expected {name} of type {names}, got {value!r:.50}")
    return fields


def _is_one_of(value: object, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _check_text(text: str) -> None:
    """Raise ValueError for half of a character outside the first 65,536, which is no text."""
    text.encode("utf-8")


def jsonable(value: object) -> Any:
    """Convert dataclasses and models, also nested ones, to JSON values; NaN becomes null."""
    return pydantic_core.from_json(pydantic_core.to_json(value, inf_nan_mode="null"))


def json_text(value: object) -> str:
    """Return dataclasses, models and values as indented JSON; NaN becomes null.

    Faster than `json.dumps` of `jsonable`, for documents of tens of megabytes.
    """
    return pydantic_core.to_json(value, inf_nan_mode="null", indent=1).decode()


def write_json(path: Path, document: object, *, mode: int = 0o666) -> None:
    """Replace `path` atomically and durably (same-directory temporary, fsync, rename).

    document: a mapping or a dataclass. mode: of the file, reduced by the umask.
    """
    with replacing(path, mode) as file:
        file.write(json.dumps(document, indent=1, default=fields_of) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace `path` atomically and durably with `text`."""
    with replacing(path) as file:
        file.write(text)


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[TextIO]:
    """Open a new file that replaces `path` atomically and durably if the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode & ~_umask())  # mkstemp gives 0600
        Path(temporary).replace(path)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(path)  # a full disk is reported without a name
        Path(temporary).unlink(missing_ok=True)
        raise


@cache
def _umask() -> int:
    """Return the umask at the first call; os.umask would change it for other threads, too."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return next(int(line.split()[1], 8) for line in status.splitlines() if "Umask:" in line)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises DataError if it is missing or not one."""
    try:
        content = content_of(path)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    return json_object(content, str(path))


_Row = TypeVar("_Row")


def typed(fields: Mapping[str, Any], kind: type[_Row], path: Path) -> _Row:
    """Convert `fields` to the dataclass `kind`. Raises DataError that names `path`."""
    try:
        return _adapter(kind).validate_python(fields)
    except ValidationError as error:
        raise _mismatch(path, kind, error) from error


def document(path: Path, kind: type[_Row]) -> _Row | None:
    """Read a JSON document as `kind`; None where there is no such file.

    Raises DataError if it is damaged.
    """
    try:
        content = content_of(path)
        found = _adapter(kind).validate_json(content)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise _mismatch(path, kind, error) from error
    json_object(content, str(path))  # checks the values
    return found


def _adapter(kind: type[_Row]) -> TypeAdapter[_Row]:
    return cast("TypeAdapter[_Row]", _adapter_of(cast("Hashable", kind)))


@cache
def _adapter_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _mismatch(path: Path, kind: type[object], error: ValidationError) -> DataError:
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "the document"
    return DataError(f"{path}: expected the fields of {kind.__name__}: {where}: {first['msg']}")


# --- new lines of a file that another process appends to -----------------------------------------

_CHUNK_BYTES = 1 << 20


class LineTail:
    """Continues where the last call stopped; an unfinished line waits for the next call.

    Call `was_replaced` before `lines`: a file that has not grown is not opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = str(path)
        self._offset = self._size = 0
        self._identity: tuple[int, int] | None = None  # device and inode of the file read so far

    def was_replaced(self) -> bool:
        """Return whether the file is another one than before, or shorter than what was read. A file
        that cannot be examined counts as unchanged."""
        try:
            found = os.stat(self._name)  # noqa: PTH116  (every second, of every rank's files)
        except OSError:
            self._size = self._offset
            return False
        self._size = found.st_size
        if self._identity is None:
            return False
        return _identity(found) != self._identity or found.st_size < self._offset

    def rewind(self) -> None:
        """Start at the beginning in the next call."""
        self._offset, self._identity = 0, None

    def lines(self, *, to_the_end: bool = False) -> Iterator[bytes]:
        """Yield new lines: those within the next MiB, or all of them (`to_the_end`).

        A longer line is not a row of a run; it comes in pieces. Raises OSError.
        """
        if self._size <= self._offset:
            return
        # os.open takes a third of the time of open(), and this runs for every rank's files.
        descriptor = os.open(self._name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._identity = _identity(os.fstat(descriptor))
            while chunk := self._next_chunk(descriptor):
                yield from chunk.splitlines()
                if not to_the_end:
                    return
        finally:
            os.close(descriptor)

    def _next_chunk(self, descriptor: int) -> bytes:
        """Return whole lines, which are not read again; empty if no line is complete yet."""
        chunk = os.pread(descriptor, _CHUNK_BYTES, self._offset)
        whole = len(chunk) if len(chunk) == _CHUNK_BYTES else 0
        end = chunk.rfind(b"\n") + 1 or whole
        self._offset += end
        return chunk[:end]


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
