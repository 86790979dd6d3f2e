"""Open a Petastorm data set that `ingest` wrote, and verify it against its manifest.

Nothing here unpickles anything: Petastorm's pickled schema in `_common_metadata` may run any code
when it is loaded (uber/petastorm#741). `row_groups` reads Parquet files by name, for which
Petastorm takes the schema from the Parquet footers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from paceline.data.manifest import MANIFEST_NAME, DatasetManifest, from_json
from paceline.errors import DataError, EnvironmentLacks, UsageError
from paceline.records.files import read_json

if TYPE_CHECKING:
    from collections.abc import Callable

COLUMNS = ("sample_id", "label", "image", "sha256", "source")
_URL_RESERVED = "#?;"
_HOW_TO_MAKE = "make one with `paceline data ingest IMAGES_DIR OUT_DATASET`"


@dataclass(frozen=True, slots=True)
class Dataset:
    """An opened data set: its folder and its manifest."""

    path: Path
    manifest: DatasetManifest

    @property
    def row_group_rows(self) -> tuple[int, ...]:
        """Number of samples in each row group, for `plan.sample_order.SampleOrder`."""
        return tuple(group.rows for group in self.manifest.row_groups)

    @property
    def samples(self) -> int:
        return self.manifest.samples

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; label i is classes[i]."""
        return self.manifest.classes

    def row_group_path(self, index: int) -> Path:
        """Return the Parquet file of row group `index`."""
        return self.path / self.manifest.row_groups[index].file

    def verify_row_group(self, index: int) -> None:
        """Read the file of row group `index` and compare it with the manifest's checksum.

        The checksum covers every page of every column, labels included. Raises DataError.
        """
        expected = self.manifest.row_groups[index].sha256
        try:
            with self.row_group_path(index).open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise self.damaged(index, f"cannot be read ({error.strerror})") from None
        if found != expected:
            raise self.damaged(
                index, f"expected sha256 {expected}, found {found}: it was changed or damaged"
            )

    def damaged(self, index: int, what: str) -> DataError:
        """Return the error about the file of row group `index`."""
        return DataError(
            f"{self.row_group_path(index)} (row group {index}): {what}; ingest the images again "
            "with `paceline data ingest`"
        )


def local_path(path: str | Path) -> Path:
    """Return the local folder that a path or file:// URL names.

    Raises UsageError for another scheme, and for characters that Petastorm would cut off because
    it reads paths as URLs.
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
            f"{text}: the path of a data set must not contain any of {' '.join(_URL_RESERVED)} "
            "(Petastorm reads paths as URLs); choose another folder"
        )
    return Path(text).absolute()


def open_dataset(path: str | Path) -> Dataset:
    """Open the data set at `path` (a folder or a file:// URL).

    Checks the manifest, and that the file of each row group has the size, the columns and the
    number of rows that the manifest states. Checksums are verified when a file is read.
    Raises EnvironmentLacks if there is no data set, DataError if it is damaged.
    """
    folder = local_path(path)
    if not folder.is_dir():
        raise EnvironmentLacks(f"{folder}: there is no such data set; {_HOW_TO_MAKE}")
    if not (folder / MANIFEST_NAME).is_file():
        raise EnvironmentLacks(
            f"{folder}: expected a data set with {MANIFEST_NAME}, found none; {_HOW_TO_MAKE}"
        )
    manifest = from_json(read_json(folder / MANIFEST_NAME), str(folder / MANIFEST_NAME))
    dataset = Dataset(folder, manifest)
    for index in range(len(manifest.row_groups)):
        _check_row_group(dataset, index)
    return dataset


def _check_row_group(dataset: Dataset, index: int) -> None:
    file, group = dataset.row_group_path(index), dataset.manifest.row_groups[index]
    if not file.is_file():
        raise dataset.damaged(index, "the manifest lists this file, but it is missing")
    size = file.stat().st_size
    if size != group.size_bytes:
        raise dataset.damaged(index, f"expected {group.size_bytes} bytes, found {size}")
    try:
        footer = pq.read_metadata(file)
    except (pa.ArrowException, OSError) as error:
        raise dataset.damaged(index, f"its Parquet footer is damaged: {error}") from None
    if (footer.num_rows, footer.num_row_groups) != (group.rows, 1):
        raise dataset.damaged(
            index,
            f"expected {group.rows} rows in 1 row group, found {footer.num_rows} in "
            f"{footer.num_row_groups}",
        )
    missing = set(COLUMNS) - set(footer.schema.names)
    if missing:
        raise dataset.damaged(index, f"columns missing: {', '.join(sorted(missing))}")


def inspect_dataset(
    path: str | Path, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Return the facts that `paceline data inspect` shows, after verifying every checksum.

    Values are JSON values; sizes are in bytes. progress(done, total) counts row groups.
    Raises as `open_dataset` and `Dataset.verify_row_group`.
    """
    dataset = open_dataset(path)
    manifest, rows = dataset.manifest, dataset.row_group_rows
    for index in range(len(rows)):
        dataset.verify_row_group(index)
        if progress is not None:
            progress(index + 1, len(rows))
    document = manifest.as_json()
    return {
        "schema": manifest.schema_version,
        "path": str(dataset.path),
        "samples": manifest.samples,
        "classes": dict(zip(manifest.classes, manifest.class_counts, strict=True)),
        "row_groups": len(rows),
        "row_group_rows": {"min": min(rows), "max": max(rows)},
        "size_bytes": sum(group.size_bytes for group in manifest.row_groups),
        "images": document["image_stats"],
        "seed": manifest.seed,
        "content_sha256": manifest.content_sha256,
        "skipped": document["skipped"],
        "versions": manifest.versions,
        "created": manifest.created,
        "checksums": "verified",
    }
