"""Register Parquet files as a data set: describe their fields and files in a manifest.

The files are not changed. Petastorm data sets and plain Parquet files are treated alike: fields
are derived from the Parquet schema and the first values, never from Petastorm's pickled schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from paceline.base.errors import DataError, EnvironmentLacks, UsageError
from paceline.train.data.location import Location, location_of, made_folder
from paceline.train.data.manifest import (
    CODECS,
    MANIFEST_NAME,
    DataFile,
    DatasetManifest,
    Field,
    UnusableField,
    field_of,
)

_SUFFIXES = (".parquet", ".parq", ".pq")
_PACKAGES = ("petastorm", "pyarrow", "numpy")
_BATCH_ROWS = 1024
# An integer column without negative values is taken for class indices up to this number.
_MAX_CLASSES = 100_000


def register(
    name: str | Path,
    *,
    manifest_dir: Path | None = None,
    codecs: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DatasetManifest:
    """Write the manifest of the Parquet files below a folder or URL, and return it.

    manifest_dir: folder for the manifest where the location must not be written to; its path is
    then the data set's. codecs: by column, where the bytes do not show it. progress(done, total)
    counts files. An existing manifest of this kind is replaced.
    Raises UsageError for codecs of other columns or a data set that ingest made, DataError for
    files that are not alike or have no field, EnvironmentLacks if the place cannot be used.
    """
    location = location_of(name)
    target = location if manifest_dir is None else location_of(made_folder(manifest_dir))
    _check_replaceable(target)
    codecs = codecs or {}
    sizes = {p: s for p, s in location.sizes().items() if p.endswith(_SUFFIXES)}
    if not sizes:
        raise DataError(
            f"{location.name}: expected Parquet files ({', '.join(_SUFFIXES)}), found none"
        )
    schema, fields, ignored = _columns(location, next(iter(sizes)), codecs)
    files, highest = [], dict.fromkeys((f.name for f in fields if _may_be_classes(f)), -1)
    for done, (path, size) in enumerate(sizes.items(), start=1):
        footer = _footer(location, path)
        _check_alike(location, path, footer, schema)
        if footer.num_rows:
            files.append(_file(location, path, size, footer))
            _look_at_values(footer, fields, ignored, highest)
            _look_at_lists(location, path, fields, ignored)
        if progress is not None:
            progress(done, len(sizes))
    usable = [_with_classes(f, highest) for f in fields if f.name not in ignored]
    if not files or not usable:
        raise DataError(
            f"{location.name}: expected rows and at least one usable column, found "
            f"{len(files)} files with rows; columns: {_listed(ignored)}"
        )
    manifest = DatasetManifest(
        location=None if target is location else location.name,
        fields=tuple(usable),
        ignored=ignored,
        samples=sum(sum(file.row_group_rows) for file in files),
        files=tuple(files),
        versions={package: version(package) for package in _PACKAGES},
    )
    _write(target, manifest)
    return manifest


def _check_replaceable(target: Location) -> None:
    content = target.read(MANIFEST_NAME)
    if content is None:
        return
    try:
        made_by_ingest = bool(json.loads(content).get("classes"))
    except (ValueError, AttributeError):
        made_by_ingest = False  # damaged: it is replaced
    if made_by_ingest:
        raise UsageError(
            f"{target.name}: `paceline data ingest` made this data set, so it is registered already"
        )


def _columns(
    location: Location, path: str, codecs: Mapping[str, str]
) -> tuple[pa.Schema, list[Field], dict[str, str]]:
    """Return the schema of a file, its fields, and the columns that are none with the reasons."""
    with _readable(location, path), location.open(path) as stream:
        file = pq.ParquetFile(stream)
        schema = file.schema_arrow
        unknown = set(codecs) - set(schema.names)
        if unknown:
            raise UsageError(
                f"--codec {min(unknown)}: expected a column, one of {', '.join(schema.names)}"
            )
        fields, ignored = [], {}
        for name in schema.names:
            values = _first_values(file, name)
            try:
                fields.append(field_of(name, values, codecs.get(name)))
            except UnusableField as reason:
                if name in codecs:
                    raise UsageError(
                        f"--codec {name}={codecs[name]}: {reason}; the codecs are "
                        f"{', '.join(CODECS)}"
                    ) from None
                ignored[name] = str(reason)
    return schema, fields, ignored


def _first_values(file: pq.ParquetFile, name: str) -> pa.ChunkedArray:
    empty = pa.chunked_array([], file.schema_arrow.field(name).type)
    batch = next(file.iter_batches(batch_size=1, columns=[name]), None)
    # A column of that name within a nested one may be read in its place.
    if batch is None or name not in batch.schema.names:
        return empty
    return pa.chunked_array([batch.column(batch.schema.get_field_index(name))])


def _footer(location: Location, path: str) -> pq.FileMetaData:
    with _readable(location, path), location.open(path) as stream:
        return pq.read_metadata(stream)


@contextmanager
def _readable(location: Location, path: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{location.name}/{path}: expected a Parquet file, got: {error}; remove or replace it"
        ) from None


def _check_alike(location: Location, path: str, footer: pq.FileMetaData, schema: pa.Schema) -> None:
    found = footer.schema.to_arrow_schema()
    if not found.equals(schema, check_metadata=False):
        different = sorted(
            {f"{f.name}: {f.type}" for f in found} ^ {f"{f.name}: {f.type}" for f in schema}
        )
        raise DataError(
            f"{location.name}/{path}: expected the columns of the first file; different are "
            f"{', '.join(different) or 'their order or nullability'}"
        )


def _file(location: Location, path: str, size: int, footer: pq.FileMetaData) -> DataFile:
    rows = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
    if 0 in rows:
        raise DataError(
            f"{location.name}/{path}: row group {rows.index(0)} has no rows; write the file again"
        )
    return DataFile(
        path=path, row_group_rows=tuple(rows), size_bytes=size, sha256=location.sha256(path)
    )


def _look_at_values(
    footer: pq.FileMetaData,
    fields: list[Field],
    ignored: dict[str, str],
    highest: dict[str, int],
) -> None:
    """Use the statistics in a footer: fields with missing values are ignored, and the highest class
    indices are kept; -2 stands for no class indices."""
    places = {footer.schema.column(n).path: n for n in range(footer.num_columns)}
    for field in fields:
        if field.name not in places:
            continue  # a list, whose statistics are those of its elements
        for number in range(footer.num_row_groups):
            found = footer.row_group(number).column(places[field.name]).statistics
            if found is not None and found.null_count:
                ignored[field.name] = f"{found.null_count} values are missing (null)"
            if field.name in highest:
                known = found is not None and found.has_min_max and found.min >= 0
                before = highest[field.name]
                highest[field.name] = max(before, found.max) if known and before != -2 else -2


def _look_at_lists(
    location: Location, path: str, fields: list[Field], ignored: dict[str, str]
) -> None:
    """Ignore fields whose lists have different lengths, or missing values. Reads the columns."""
    names = [f.name for f in fields if f.codec == "list" and f.name not in ignored]
    if not names:
        return
    lengths = {f.name: f.shape[0] for f in fields if f.name in names}
    with _readable(location, path), location.open(path) as stream:
        for batch in pq.ParquetFile(stream).iter_batches(batch_size=_BATCH_ROWS, columns=names):
            for name in [name for name in names if name not in ignored]:
                column = batch.column(batch.schema.get_field_index(name))
                different = [n for n in _lengths(column) if n != lengths[name]]
                if different:
                    found = "missing" if different[0] is None else f"one of {different[0]}"
                    ignored[name] = f"expected lists of {lengths[name]} values, {found} in {path}"
                elif column.flatten().null_count:
                    ignored[name] = f"values are missing (null) within lists in {path}"


def _lengths(column: pa.Array) -> list[int | None]:
    lengths: list[int | None] = pc.list_value_length(column).unique().to_pylist()
    return lengths


def _may_be_classes(field: Field) -> bool:
    return field.codec == "scalar" and "int" in field.dtype


def _with_classes(field: Field, highest: Mapping[str, int]) -> Field:
    found = highest.get(field.name, -2)
    if not 0 <= found < _MAX_CLASSES:
        return field
    return field.model_copy(update={"classes": found + 1})


def _listed(ignored: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in ignored.items()) or "none"


def _write(target: Location, manifest: DatasetManifest) -> None:
    document: dict[str, Any] = manifest.as_json()
    try:
        target.write(MANIFEST_NAME, json.dumps(document, indent=1).encode())
    except EnvironmentLacks as error:
        raise EnvironmentLacks(
            f"{error}. To keep the manifest in another place, use --manifest-dir DIR; DIR is then "
            "the data set"
        ) from None
