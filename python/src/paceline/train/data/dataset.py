"""Open a data set, local or remote, and verify it against its manifest.

Nothing here unpickles anything: Petastorm's pickled schema in `_common_metadata` may run any code
when it is loaded (uber/petastorm#741). `row_groups` reads Parquet files by name, for which
Petastorm takes the schema from the Parquet footers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.base.errors import DataError, EnvironmentLacks, UsageError
from paceline.measure.records.files import json_object
from paceline.plan.trials.sample_order import SampleOrder, sample_order_of
from paceline.plan.trials.trial import Training
from paceline.train.data.items import virtual_row_groups
from paceline.train.data.location import Location, location_of
from paceline.train.data.manifest import MANIFEST_NAME, DataFile, DatasetManifest, Field, from_json
from paceline.train.data.node_files import fetched

_HOW_TO_MAKE = (
    "make one from images with `paceline data ingest IMAGES_DIR OUT_DATASET`, or use Parquet files "
    "with `paceline data register DATASET`"
)


@dataclass(frozen=True, slots=True)
class Dataset:
    """An opened data set: its name, its manifest and the location of its files.

    copies: folder for local copies of the files of a remote data set.
    """

    name: str
    manifest: DatasetManifest
    location: Location
    copies: Path | None = None

    @property
    def row_group_rows(self) -> tuple[int, ...]:
        """Number of samples in each row group, for `plan.sample_order.SampleOrder`."""
        return tuple(group.rows for group in self.manifest.row_groups)

    @property
    def samples(self) -> int:
        return self.manifest.samples

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; label i is classes[i]. Empty if they are not known."""
        return self.manifest.classes

    def with_copies(self, folder: Path | None) -> Dataset:
        """Return the same data set, whose remote files are copied to `folder`."""
        return replace(self, copies=folder)

    def field(self, name: str) -> Field:
        """Return a field. Raises UsageError with those that exist."""
        for field in self.manifest.fields:
            if field.name == name:
                return field
        known = ", ".join(field.describe() for field in self.manifest.fields)
        ignored = self.manifest.ignored.get(name)
        why = f"; the column {name} cannot be used: {ignored}" if ignored else ""
        raise UsageError(
            f'{self.name}: expected a field "{name}", found {known or "no fields"}{why}; set '
            "input_field and target_field of the task"
        )

    def file_of(self, index: int) -> Path:
        """Return the local path of the file of row group `index`, whose checksum is right.

        The checksum covers every page of every column, labels included. A remote file is copied
        first. Raises DataError, EnvironmentLacks.
        """
        file = self.manifest.row_groups[index].file
        if not self.location.is_local:
            assert self.copies is not None, "a remote data set is read from copies"
            return fetched(self.location, file, self.copies)
        self.verify_file(file)
        return Path(self.location.root, file.path)

    def verify_file(self, file: DataFile) -> None:
        """Read a file where it is and compare it with its checksum. Raises DataError,
        EnvironmentLacks."""
        try:
            found = self.location.sha256(file.path)
        except EnvironmentLacks as error:
            raise self.damaged_file(file, f": {error}") from None
        if found != file.sha256:
            raise self.damaged_file(
                file,
                f": expected sha256 {file.sha256}, found {found}: it was changed or damaged",
            )

    def damaged(self, index: int, what: str) -> DataError:
        """Return the error about the file of row group `index`."""
        return self.damaged_file(
            self.manifest.row_groups[index].file, f" (row group {index}): {what}"
        )

    def damaged_file(self, file: DataFile, what: str) -> DataError:
        """Return the error about a file."""
        again = (
            "ingest the images again with `paceline data ingest`"
            if self.manifest.id_field
            else "if that is intended, register the data set again with `paceline data register`"
        )
        return DataError(f"{self.location.root}/{file.path}{what}; {again}")


def open_dataset(name: str | Path, *, check_files: bool = True) -> Dataset:
    """Open the data set with this path or URL.

    Checks the manifest, and that each file has the size that it states; check_files: False leaves
    that to another rank of this node. Opens none of the files, of which there may be many thousand:
    checksums, and with them columns and row groups, are verified when a file is read.
    Raises EnvironmentLacks if there is no data set or it cannot be reached, DataError if it is
    damaged.
    """
    place = location_of(name)
    if place.is_local and not Path(place.root).is_dir():
        raise EnvironmentLacks(f"{place.name}: there is no such data set; {_HOW_TO_MAKE}")
    content = place.read(MANIFEST_NAME)
    if content is None:
        raise EnvironmentLacks(
            f"{place.name}: expected a data set with {MANIFEST_NAME}, found none; {_HOW_TO_MAKE}"
        )
    where = f"{place.name}/{MANIFEST_NAME}"
    manifest = from_json(json_object(content, where), where)
    location = place if manifest.location is None else location_of(manifest.location)
    dataset = Dataset(place.name, manifest, location)
    if check_files:
        _check_files(dataset)
    return dataset


def order_of(training: Training) -> SampleOrder:
    """Return the order of the samples; reads no sample. Raises as `open_dataset`."""
    if training.items is not None:
        return sample_order_of(training, virtual_row_groups(training.items))
    return sample_order_of(training, open_dataset(training.dataset).row_group_rows)


def _check_files(dataset: Dataset) -> None:
    sizes = dataset.location.sizes()
    for file in dataset.manifest.files:
        size = sizes.get(file.path)
        if size is None:
            raise dataset.damaged_file(file, ": the manifest lists this file, but it is missing")
        if size != file.size_bytes:
            raise dataset.damaged_file(file, f": expected {file.size_bytes} bytes, found {size}")


def inspect_dataset(name: str | Path) -> dict[str, Any]:
    """Return the facts that `paceline data inspect` shows, after verifying every checksum.

    Values are JSON values; sizes are in bytes. Raises as `open_dataset` and `Dataset.file_of`.
    """
    dataset = open_dataset(name)
    manifest, rows = dataset.manifest, dataset.row_group_rows
    for file in manifest.files:
        dataset.verify_file(file)
    document = manifest.as_json()
    return {
        "schema": manifest.schema_version,
        "path": dataset.name,
        "location": dataset.location.name,
        "samples": manifest.samples,
        "fields": {f.pop("name"): f for f in document["fields"]},
        "ignored": manifest.ignored,
        "classes": dict(zip(manifest.classes, manifest.class_counts, strict=True)),
        "files": len(manifest.files),
        "row_groups": len(rows),
        "row_group_rows": {"min": min(rows), "max": max(rows)},
        "size_bytes": sum(file.size_bytes for file in manifest.files),
        "images": document["image_stats"],
        "seed": manifest.seed,
        "content_sha256": manifest.content_sha256,
        "skipped": document["skipped"],
        "versions": manifest.versions,
        "created": manifest.created,
        "checksums": "verified",
    }
