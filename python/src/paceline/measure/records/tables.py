"""Rows as Polars frames: JSON lines while a trial runs, Parquet after it was compacted.

Callers name the file of JSON lines. If a Parquet file of the same name is beside it, that file is
complete and is read instead.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import polars as pl
from polars._typing import PolarsDataType

from paceline.base.errors import DataError
from paceline.measure.records.files import (
    LARGEST,
    FieldTypes,
    check_types,
    content_of,
    is_seconds,
    is_time,
    json_object,
    read_jsonl,
    sync_folder,
    typed,
)
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.metrics import METRICS, RANK, Metric
from paceline.measure.records.rows import (
    CommunicationRow,
    EvaluationRow,
    SampleLogRow,
    StepRow,
    UpdateRow,
)

_Row = TypeVar("_Row")
_HEADER = "paceline_header"  # key in the metadata of a Parquet file
_SIMPLE: dict[Any, PolarsDataType] = {
    int: pl.Int64,
    float: pl.Float64,
    str: pl.String,
    bool: pl.Boolean,
}


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Columns of a file of rows.

    types: by column, without nested values: they differ between rows.
    required: columns whose values may be neither missing nor null.
    is_open: rows may have more columns, whose types follow from their values.
    nested: paths of values within dictionaries and lists, and whether these are numbers. A part
    with a brace stands for every key.
    """

    name: str
    types: Mapping[str, PolarsDataType]
    required: tuple[str, ...]
    is_open: bool = False
    nested: tuple[tuple[tuple[str, ...], bool], ...] = ()


def parquet_path(path: Path) -> Path:
    """Return the compacted form of the JSON lines file `path`."""
    return path.with_suffix(".parquet")


def read_table(
    path: Path, kind: type | RowFormat, columns: Sequence[str] | None = None
) -> pl.DataFrame:
    """Read the rows of `path` in either form; no rows where there is no file.

    kind: the dataclass of the rows, or their format. columns: only these; None reads all.
    Optional fields that are newer than the file are null.
    Raises DataError if a row is damaged or lacks a required field.
    """
    expected = format_of(kind)
    frame = _read_parquet(path, columns)
    if frame is not None:
        wanted = list(expected.types) if columns is None else columns
        missing = [name for name in wanted if name not in frame]
        lacking = [name for name in expected.required if name in missing]
        if lacking:
            raise DataError(
                f"{parquet_path(path)}: expected the fields of {expected.name}: there is no column "
                f"{lacking[0]}"
            )
        return _checked(_with_nulls(frame, expected, missing), expected, parquet_path(path))
    if not path.exists():
        frame = pl.DataFrame(schema=expected.types)
    elif expected.is_open:
        frame = frame_of([row for row in read_jsonl(path) if "unix_s" in row], expected, path)
    else:
        frame = _read_lines(path, expected)
    return frame if columns is None else frame.select(columns)


def rows(path: Path, kind: type[_Row]) -> tuple[_Row, ...]:
    """Read all rows of `path` in either form as dataclasses."""
    given = {f.name for f in dataclasses.fields(typing.cast("Any", kind)) if not _has_default(f)}
    return tuple(
        typed({k: v for k, v in row.items() if v is not None or k in given}, kind, path)
        for row in row_dicts(path)
    )


def row_dicts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of `path` in either form as dictionaries.

    The header of a trace is a row of its JSON lines, but not of its Parquet file.
    """
    frame = _read_parquet(path, None)
    if frame is not None:
        for row in frame.iter_rows(named=True):
            yield {name: _without_nulls(value) for name, value in row.items()}
    elif path.exists():
        yield from read_jsonl(path)


_TYPES_OF_HEADER: FieldTypes = {
    "cores": (int, type(None)),
    "interval_s": (int, float, type(None)),
    **{name: (str, type(None)) for name in ("boot_id", "run", "version")},
}


def checked_dicts(path: Path, kind: RowFormat) -> list[dict[str, Any]]:
    """Return the rows of `path` as `row_dicts`. Raises DataError as `read_table`."""
    return [_without_nulls(row) for row in read_table(path, kind).iter_rows(named=True)]


def read_header(path: Path) -> dict[str, Any]:
    """Read the first line of a trace: facts about the host. Empty where there is none.

    Raises DataError if it is damaged.
    """
    compacted = parquet_path(path)
    if compacted.exists():
        with _explained(compacted):
            header = pl.read_parquet_metadata(compacted).get(_HEADER, "{}")
        found = json_object(header.encode(), f"{compacted}: header")
    else:
        first = next(read_jsonl(path), None) if path.exists() else None
        found = first if first is not None and "unix_s" not in first else {}
    return check_types(found, _TYPES_OF_HEADER, f"{path}: header")


def write_parquet(frame: pl.DataFrame, path: Path, header: dict[str, Any]) -> None:
    """Write `frame` with its header to `path`.

    Times have random digits: zstd would make files a fifth smaller, but reading takes 1.6 times as
    long (10,000 steps, 2-core AMD EPYC, 2026-11-22).
    """
    frame.write_parquet(
        path, compression="snappy", statistics=False, metadata={_HEADER: json.dumps(header)}
    )


def frame_of(found: list[dict[str, Any]], kind: type | RowFormat, path: Path) -> pl.DataFrame:
    """Turn rows into a frame; a dictionary becomes a struct of all its keys.

    Columns that `kind` does not contain are kept.
    path: of the rows, for messages. Raises DataError if a row is damaged.
    """
    expected = format_of(kind)
    kept = [{k: v for k, v in row.items() if v not in ({}, [])} for row in found]
    try:
        frame = pl.DataFrame(
            kept, schema_overrides=expected.types, infer_schema_length=None, strict=False
        )
    except (pl.exceptions.PolarsError, TypeError) as error:
        raise DataError(f"{path}: expected the fields of {expected.name}: {error}") from error
    missing = [name for name in expected.types if name not in frame]
    return _checked(_with_nulls(frame, expected, missing), expected, path)


def _with_nulls(frame: pl.DataFrame, expected: RowFormat, missing: list[str]) -> pl.DataFrame:
    nulls = [pl.lit(None, dtype=expected.types[name]).alias(name) for name in missing]
    return frame.with_columns(nulls) if nulls else frame


def format_of(kind: type | RowFormat) -> RowFormat:
    """Return the row format of a dataclass; return a given row format unchanged."""
    return kind if isinstance(kind, RowFormat) else _format_of(kind)


@cache
def _format_of(kind: Any) -> RowFormat:
    hints = typing.get_type_hints(kind)
    found = {name: _data_type(hint) for name, hint in hints.items()}
    required = tuple(
        field.name
        for field in dataclasses.fields(kind)
        if types.NoneType not in typing.get_args(hints[field.name]) and not _has_default(field)
    )
    plain = {name: each for name, each in found.items() if each is not None}
    return RowFormat(kind.__name__, plain, required)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return (
        field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    )


def _data_type(hint: Any) -> PolarsDataType | None:
    """Return the column type of a field; None for dictionaries and nested rows."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [part for part in parts if part is not types.NoneType]
        return _data_type(kinds[0])
    if origin is typing.Literal:
        return pl.String
    if origin is list:
        inner = _data_type(parts[0])
        return None if inner is None else pl.List(inner)
    return _SIMPLE.get(hint)


def _read_parquet(path: Path, columns: Sequence[str] | None) -> pl.DataFrame | None:
    compacted = parquet_path(path)
    if not compacted.exists():
        return None
    with _explained(compacted):
        if columns is not None:
            present = pl.read_parquet_schema(compacted)
            columns = [name for name in columns if name in present]
        return pl.read_parquet(compacted, columns=columns, glob=False)


@contextmanager
def _explained(compacted: Path) -> Iterator[None]:
    """Raise DataError for what reading a damaged Parquet file raises; panics are those of Rust."""
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, ValueError, OSError) as error:
        raise DataError(f"{compacted}: not readable as Parquet: {error}") from error


def _read_lines(path: Path, expected: RowFormat) -> pl.DataFrame:
    data = content_of(path)
    whole = data[: data.rfind(b"\n") + 1]  # the writer may have been killed within the last row
    try:
        frame = pl.read_ndjson(io.BytesIO(whole), schema=expected.types) if whole else None
    except pl.exceptions.PolarsError:
        frame = _read_slowly(path, expected)  # NaN is valid here, but not for Polars
    if frame is None:
        return pl.DataFrame(schema=expected.types)
    return _checked(frame, expected, path)


def _read_slowly(path: Path, expected: RowFormat) -> pl.DataFrame:
    """Read line by line: accepts NaN, and names the damaged line."""
    found = list(read_jsonl(path))
    try:
        return pl.DataFrame(found, schema=expected.types)
    except (pl.exceptions.PolarsError, TypeError) as error:
        raise DataError(f"{path}: expected the fields of {expected.name}: {error}") from error


_OF_EVERY_SAMPLE = ("unix_s", "rank", "pid")


def _checked(frame: pl.DataFrame, expected: RowFormat, path: Path) -> pl.DataFrame:
    """Return the frame with the types of its format. Raises DataError for another type, a missing
    value, and for a number that no writer of Paceline's produces."""
    # a compacted trace of another version may lack a metric
    is_trace = expected.is_open and path.suffix == ".parquet"
    for name in _OF_EVERY_SAMPLE if is_trace else expected.required:
        if name in frame and frame[name].null_count():
            raise DataError(
                f"{path}: expected the fields of {expected.name}: {name} is missing in row "
                f"{frame[name].is_null().arg_max()}"
            )
    other = {
        name: kind
        for name, kind in expected.types.items()
        if name in frame and frame.schema[name] != kind
    }
    for name, kind in other.items():
        if not _fits(frame.schema[name], kind):
            raise DataError(
                f"{path}: expected the fields of {expected.name}: {name} is {frame.schema[name]}"
            )
    for path_in_row, is_number in expected.nested:
        name, *inner = path_in_row
        if name in frame and not _has_values_at(frame.schema[name], inner, is_number=is_number):
            raise DataError(
                f"{path}: expected the fields of {expected.name}: values at "
                f"{'.'.join(path_in_row)}, found {str(frame.schema[name])[:200]}"
            )
    with _explained(path):
        typed_frame = frame.cast(other) if other else frame  # type: ignore[arg-type]
    _check_numbers(typed_frame, path)
    return typed_frame


def _fits(found: PolarsDataType, expected: PolarsDataType) -> bool:
    """Return whether the values of a column may be converted to another type."""
    if isinstance(found, pl.List) and isinstance(expected, pl.List):
        return _fits(found.inner, expected.inner)
    return found == pl.Null or (found.is_numeric() and expected.is_numeric())


def _has_values_at(found: PolarsDataType, parts: Sequence[str], *, is_number: bool) -> bool:
    """Return whether a column has values of a type at a path, wherever it has something there."""
    if found == pl.Null:
        return True
    if not parts:
        return found.is_numeric() if is_number else found == pl.String
    part, *rest = parts
    if isinstance(found, pl.List):
        return "{" in part and _has_values_at(found.inner, rest, is_number=is_number)
    if not isinstance(found, pl.Struct):
        return False
    return all(
        _has_values_at(field.dtype, rest, is_number=is_number)
        for field in found.fields
        if "{" in part or field.name == part
    )


def _check_numbers(frame: pl.DataFrame, path: Path) -> None:
    """Raise DataError for a time that is none, and for a number whose square is none."""
    values = [
        found
        for name, kind in frame.schema.items()
        for found in _numbers_of(name, kind, pl.col(name))
    ]
    tests = [
        (
            ~is_seconds(name, value)
            if is_time(name)
            else (value.abs() > LARGEST) & value.is_finite()
        ).any()
        for name, value in values
    ]
    if not tests:
        return
    odd = frame.select(test.alias(str(place)) for place, test in enumerate(tests)).row(0)
    for (name, _), is_odd in zip(values, odd, strict=True):
        if is_odd:
            what = "seconds" if is_time(name) else f"numbers up to {LARGEST:g}"
            raise DataError(f"{path}: expected {what} in {name}, got others")


def _numbers_of(name: str, kind: PolarsDataType, value: pl.Expr) -> Iterator[tuple[str, pl.Expr]]:
    """Yield the numbers in a column with their names: those with a fraction."""
    if isinstance(kind, pl.Struct):
        for field in kind.fields:
            yield from _numbers_of(field.name, field.dtype, value.struct.field(field.name))
    elif isinstance(kind, pl.List):
        yield from _numbers_of(name, kind.inner, value.explode())
    elif kind.is_float():
        yield name, value


def _without_nulls(value: Any) -> Any:
    """Drop null entries: a struct has the keys of all rows, and absent fields have defaults."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


# --- formats of the sidecar's rows, derived from the declared metrics ----------------------------
#
# `hosts/<host>/trace.jsonl` has one sample of the host for each tick, `hosts/<host>/ranks.jsonl`
# one of each rank's processes. Both contain counters and gauges only: the analysis computes shares,
# rates and peaks. A value is null where nothing was measured or where it is not read at every tick.


def _format(name: str, own: dict[str, PolarsDataType], metrics: Iterable[Metric]) -> RowFormat:
    """Return the format of rows with the columns `own` and those of the metrics."""
    types = dict(own)
    required = list(own)
    metrics = tuple(metrics)
    nested = tuple((m.path, m.kind != "info") for m in metrics if len(m.path) > 1)
    for metric in metrics:
        number = pl.Int64 if metric.is_whole else pl.Float64
        types |= dict.fromkeys(metric.columns, number)
        if metric.labels == ("core",):
            types[metric.path[0]] = pl.List(number)
        if metric.required:
            required += [name for name in metric.columns if name not in own]
    return RowFormat(name, types, tuple(required), is_open=True, nested=nested)


HOST_SAMPLES = _format(
    "a host's sample",
    {"unix_s": pl.Float64},
    [metric for metric in METRICS if metric.in_trace and metric.scope is not RANK],
)
# unix_s is that of the host's sample at the same tick.
RANK_SAMPLES = _format(
    "a rank's sample",
    {"unix_s": pl.Float64, "rank": pl.Int64, "pid": pl.Int64},
    [metric for metric in METRICS if metric.scope is RANK],
)


# Replace the JSON lines of an ended trial by Parquet files, which are smaller and faster to read
#
# A kill at any moment loses nothing: the Parquet file gets its name only when it is complete and on
# disk, and only then the JSON lines are deleted. Readers prefer the Parquet file.

_ATTEMPTS = 3  # for a file that is still growing


def compact_trial(files: TrialFiles) -> None:
    """Compact all rows of a trial that has ended. Files that are already compact are left alone.

    Raises DataError if a row is damaged; the JSON lines are then kept.
    """
    for path, kind in _row_files(files):
        if path.exists():
            _compact(path, kind)


def _row_files(files: TrialFiles) -> Iterator[tuple[Path, type | RowFormat]]:
    for _, rank in files.ranks():
        yield rank.steps, StepRow
        yield rank.communication, CommunicationRow
        yield rank.sample_log, SampleLogRow
        yield rank.evaluations, EvaluationRow
        yield rank.updates, UpdateRow
    for _, host in files.hosts():
        yield host.trace, HOST_SAMPLES
        yield host.ranks, RANK_SAMPLES


def _compact(path: Path, kind: type | RowFormat) -> None:
    target = parquet_path(path)
    if target.exists():  # a compaction was interrupted before it deleted the JSON lines
        path.unlink()
        return
    temporary = path.with_suffix(".parquet.tmp")
    for _ in range(_ATTEMPTS):
        size = path.stat().st_size
        write_parquet(read_table(path, kind), temporary, read_header(path))
        if path.stat().st_size == size:
            break
    else:
        temporary.unlink()
        return  # it is still growing, for example by the sidecar of another host
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(target)
    sync_folder(path.parent)
    path.unlink()
