"""Opens a Petastorm data set that `ingest` wrote, and vouches for it before anybody reads it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from paceline.data.manifest import MANIFEST_NAME, DatasetManifest, RowGroup, from_json
from paceline.data.pickles import SCHEMA_NAMES, check_pickle
from paceline.errors import DataError, EnvironmentLacks, UntrustedDataError, UsageError
from paceline.records.files import read_json

if TYPE_CHECKING:
    from collections.abc import Callable

COLUMNS = ("sample_id", "label", "image", "sha256", "source")
# Keys of `_common_metadata` whose values Petastorm unpickles (petastorm/etl/dataset_metadata.py,
# rowgroup_indexing.py).
_PICKLED_KEYS = (b"dataset-toolkit.unischema.v1", b"dataset-toolkit.rowgroups_index.v1")
_URL_RESERVED = "#?;"
_HOW = "the data set is incomplete: make it anew with `paceline data ingest`"
_HOW_TO_MAKE = "make one with `paceline data ingest PHOTOS_DIR OUT_DATASET`"


@dataclass(frozen=True, slots=True)
class Dataset:
    """An opened data set: its folder and its manifest. Only row groups are read from it."""

    path: Path
    manifest: DatasetManifest

    @property
    def row_group_rows(self) -> tuple[int, ...]:
        """Samples in each row group, for `plan.schedule.Schedule`."""
        return tuple(group.rows for group in self.manifest.row_groups)

    @property
    def samples(self) -> int:
        return self.manifest.samples

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; label i is classes[i]."""
        return self.manifest.classes

    def row_group_path(self, index: int) -> Path:
        """The Parquet file of row group `index`."""
        return self.path / self.manifest.row_groups[index].file


def local_path(path: str | Path) -> Path:
    """The local folder that a path or file:// URL names.

    Raises UsageError for another scheme, and for characters that Petastorm, which reads paths as
    URLs, would cut off.
    """
    text = str(path)
    parts = urlsplit(text)
    if "://" in text and parts.scheme == "file":
        text = unquote(parts.path)
    elif "://" in text:
        raise UsageError(
            f"{text}: expected a folder that every node sees, or its file:// URL, got a "
            f"{parts.scheme}:// URL; copy the data set to a shared or local folder first"
        )
    if any(character in text for character in _URL_RESERVED):
        raise UsageError(
            f"{text}: a data set's path must not hold any of {' '.join(_URL_RESERVED)} "
            "(Petastorm reads paths as URLs); name another folder"
        )
    return Path(text).absolute()


def open_dataset(path: str | Path, *, trust: bool = False) -> Dataset:
    """Open the data set at `path` (a folder or a file:// URL).

    Checks the manifest, that each row group's file is there with the size and the number of rows
    that the manifest says, and, unless `trust`, that Petastorm's pickled schema could not run
    foreign code; nothing is unpickled.
    Raises EnvironmentLacks if there is no data set, DataError if it is damaged,
    UntrustedDataError if its pickle may not be opened.
    """
    folder = local_path(path)
    if not folder.is_dir():
        raise EnvironmentLacks(f"{folder}: no such data set; {_HOW_TO_MAKE}")
    if not (folder / MANIFEST_NAME).is_file():
        raise EnvironmentLacks(
            f"{folder}: expected a data set with {MANIFEST_NAME}, found none; {_HOW_TO_MAKE}"
        )
    manifest = from_json(read_json(folder / MANIFEST_NAME), str(folder / MANIFEST_NAME))
    if not trust:
        check_trust(folder)
    for group in manifest.row_groups:
        _check_row_group(folder / group.file, group)
    return Dataset(folder, manifest)


def check_trust(folder: Path) -> None:
    """Scan every pickle that Petastorm would run on opening `folder`; run none.

    Raises UntrustedDataError if one imports a name that a schema does not need, and DataError if
    the metadata is missing or unreadable.
    """
    schema_seen = False
    for name in ("_common_metadata", "_metadata"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            metadata = pq.read_metadata(file).metadata or {}
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file}: not readable as Parquet metadata: {error}") from None
        for key in _PICKLED_KEYS:
            if key in metadata:
                check_pickle(metadata[key], SCHEMA_NAMES, str(file))
        schema_seen = schema_seen or _PICKLED_KEYS[0] in metadata
    if not schema_seen:
        raise DataError(f"{folder}: Petastorm's schema is missing in _common_metadata; {_HOW}")


def _check_row_group(file: Path, group: RowGroup) -> None:
    if not file.is_file():
        raise DataError(f"{file}: the manifest names this file, but it is missing; {_HOW}")
    size = file.stat().st_size
    if size != group.size_bytes:
        raise DataError(f"{file}: expected {group.size_bytes} bytes, found {size}; {_HOW}")
    try:
        footer = pq.read_metadata(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: its Parquet footer is damaged: {error}; {_HOW}") from None
    if (footer.num_rows, footer.num_row_groups) != (group.rows, 1):
        raise DataError(
            f"{file}: expected {group.rows} rows in 1 row group, found {footer.num_rows} in "
            f"{footer.num_row_groups}; {_HOW}"
        )
    missing = set(COLUMNS) - set(footer.schema.names)
    if missing:
        raise DataError(f"{file}: columns missing: {', '.join(sorted(missing))}; {_HOW}")


def verify_dataset(dataset: Dataset, progress: Callable[[int, int], None] | None = None) -> None:
    """Read every byte and compare with the manifest's checksums.

    Raises DataError naming the first file that differs.
    """
    groups = dataset.manifest.row_groups
    for done, group in enumerate(groups, start=1):
        file = dataset.path / group.file
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != group.sha256:
            raise DataError(
                f"{file}: expected sha256 {group.sha256}, found {digest}: the file was changed or "
                f"damaged; {_HOW}"
            )
        if progress is not None:
            progress(done, len(groups))


def inspect_dataset(path: str | Path) -> dict[str, Any]:
    """What `paceline data inspect` shows: JSON values, sizes in bytes. Raises as `open_dataset`.

    A data set that is not trusted is described too, with the reason in "untrusted".
    """
    untrusted = None
    try:
        dataset = open_dataset(path)
    except UntrustedDataError as error:
        untrusted = str(error)
        dataset = open_dataset(path, trust=True)
    manifest = dataset.manifest
    rows = dataset.row_group_rows
    return {
        "schema": manifest.schema,
        "path": str(dataset.path),
        "samples": manifest.samples,
        "classes": dict(zip(manifest.classes, manifest.class_counts, strict=True)),
        "row_groups": len(rows),
        "row_group_rows": {"min": min(rows), "max": max(rows)},
        "size_bytes": sum(group.size_bytes for group in manifest.row_groups),
        "images": manifest.as_json()["image_stats"],
        "seed": manifest.seed,
        "content_sha256": manifest.content_sha256,
        "skipped": manifest.as_json()["skipped"],
        "versions": manifest.versions,
        "created": manifest.created,
        "untrusted": untrusted,
    }
