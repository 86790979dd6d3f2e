"""Open a data set, local or remote, and verify it against its manifest.

Each file of a remote data set is copied to a node once, by one of the node's ranks.

Nothing here unpickles anything: Petastorm's pickled schema in `_common_metadata` may run any code
when it is loaded (uber/petastorm#741). `row_groups` reads Parquet files by name, for which
Petastorm takes the schema from the Parquet footers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.base.errors import DataError, EnvironmentLacks, UsageError
from paceline.base.host.locks import exclusive_lock, own_folder
from paceline.base.host.memory import drop_cached_pages
from paceline.collectives.node.memory import NodeShare
from paceline.measure.records.files import json_object
from paceline.plan.spec.values import local_path
from paceline.plan.trials.sample_order import SampleOrder, sample_order_of
from paceline.plan.trials.trial import Training
from paceline.train.data.items import virtual_row_groups
from paceline.train.data.location import Location, location_of, made_folder
from paceline.train.data.manifest import MANIFEST_NAME, DataFile, DatasetManifest, Field, from_json

_HOW_TO_MAKE = (
    "make one from images with `paceline data ingest IMAGES_DIR OUT_DATASET`, or use Parquet files "
    "with `paceline data register DATASET`"
)
_COPY_S = 1800.0
_ANSWER_S = 60.0
_PREFIX = "paceline-data-"
_KEPT_SHARE = 0.01  # of a data set, that may stay in memory where the rest is dropped


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

    def drop_from_memory(self) -> None:
        """Drop the files from the page cache, so that they are read from the disk again.

        Raises EnvironmentLacks if they stay there.
        """
        kept, size = 0, sum(file.size_bytes for file in self.manifest.files)
        try:
            for file in self.manifest.files:
                kept += drop_cached_pages(Path(self.location.root, file.path))
        except OSError as error:
            raise EnvironmentLacks(
                f'{self.name}: reading = "cold" drops the files from the page cache: {error}'
            ) from None
        if kept > _KEPT_SHARE * size:
            raise EnvironmentLacks(
                f'{self.name}: reading = "cold" expected files that leave the page cache, but '
                f"{kept} of {size} bytes stay; move the data set to a disk (tmpfs is memory), and "
                "end what else reads it"
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


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a local file. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetched(location: Location, file: DataFile, folder: Path) -> Path:
    """Return the path of a copy of the file in `folder`; copy it if there is none.

    One process copies and others wait. The copy appears under its checksum, complete or not at
    all. A damaged copy is replaced. Raises DataError if the file differs from the manifest,
    EnvironmentLacks if it cannot be copied.
    """
    kept = folder / f"{file.sha256}.parquet"
    busy = f"{kept}: another process has copied this file for {_COPY_S:.0f} s; end it"
    with exclusive_lock(folder / f".{file.sha256}.lock", _COPY_S, busy):
        if kept.is_file() and sha256_of_file(kept) == file.sha256:
            return kept
        _copy(location, file, kept)
    return kept


@contextmanager
def node_folder(
    location: Location, share: NodeShare, cache: str | None, key: str = "folder"
) -> Iterator[Path | None]:
    """Yield the folder for the node's copies, shared by its ranks; None for a local data set.

    cache: a folder to keep them in; None makes a temporary one, which local rank 0 removes. key:
    under which ranks find it, another one for each data set.
    Raises EnvironmentLacks if the folder cannot be made, TimedOut if local rank 0 does not answer.
    """
    if location.is_local:
        yield None
        return
    if cache is not None:
        yield made_folder(local_path(cache), "choose another folder with `cache`")
        return
    if share.local_rank != 0:
        shared = Path(share.lookup(key, _ANSWER_S))
        # A rank in another container may not see it; its copies are then its own.
        with nullcontext(shared) if shared.is_dir() else _temporary() as folder:
            yield folder
        return
    with _temporary() as folder:
        share.publish(key, str(folder))
        yield folder


@contextmanager
def _temporary() -> Iterator[Path]:
    """Yield a new folder and remove it at the end."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(own_folder(_PREFIX))
        except OSError as error:
            raise EnvironmentLacks(
                f"no folder for copies of a remote data set: {error}; set TMPDIR, or `cache`"
            ) from None
        yield folder


def _copy(location: Location, file: DataFile, kept: Path) -> None:
    partial = kept.with_suffix(".partial")
    name = f"{location.name}, file {file.path}"
    try:
        digest = hashlib.sha256()
        with partial.open("wb") as target:
            for block in location.blocks(file.path):
                digest.update(block)
                target.write(block)
        found = digest.hexdigest()
        if found != file.sha256:
            raise DataError(
                f"{name}: expected sha256 {file.sha256}, found {found}: it was changed or damaged; "
                "register the data set again with `paceline data register`"
            )
        partial.replace(kept)
    except OSError as error:
        raise EnvironmentLacks(
            f"{name}: cannot be copied to {kept.parent} ({error.strerror}); free some space, or "
            "choose another folder with `cache`"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
