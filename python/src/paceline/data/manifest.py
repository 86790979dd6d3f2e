"""The manifest of a data set: what it holds, in which order, with checksums.

It lies in the data set as `_paceline_manifest.json`; Parquet readers take names that begin with
an underscore for metadata and leave them alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from paceline.errors import DataError

MANIFEST_NAME = "_paceline_manifest.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One Parquet file, which holds one row group."""

    file: str  # name within the data set
    rows: int
    first_sample_id: int  # its samples are first_sample_id .. first_sample_id + rows - 1
    size_bytes: int
    sha256: str  # of the file


@dataclass(frozen=True, slots=True)
class SkippedPhoto:
    """A photo that was left out, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class ImageStats:
    """What the photos of a data set look like; sides are of the upright pictures, in pixels."""

    total_bytes: int
    mean_bytes: int
    width_min: int
    width_max: int
    height_min: int
    height_max: int
    reencoded: int  # photos not stored verbatim


@dataclass(frozen=True, slots=True)
class DatasetManifest:
    """Everything about a data set but its samples."""

    classes: tuple[str, ...]  # label i is classes[i]
    class_counts: tuple[int, ...]
    samples: int
    seed: int  # of the order of the samples
    content_sha256: str  # over (sample id, label, sha256 of the photo) in order
    row_groups: tuple[RowGroup, ...]
    image_stats: ImageStats
    skipped: tuple[SkippedPhoto, ...]
    versions: dict[str, str]
    created: str  # ISO 8601, UTC
    schema: int = SCHEMA_VERSION

    def as_json(self) -> dict[str, Any]:
        """The document that `from_json` reads."""
        document = asdict(self)
        return {"schema": document.pop("schema"), **document}


def from_json(document: dict[str, Any], where: str) -> DatasetManifest:
    """The manifest in `document`. Raises DataError naming `where` and what is wrong."""
    version = document.get("schema")
    if version != SCHEMA_VERSION:
        raise DataError(
            f"{where}: expected manifest schema {SCHEMA_VERSION}, got {version!r}; make the data "
            "set anew with `paceline data ingest` of this version"
        )
    try:
        fields = dict(document)
        fields["classes"] = tuple(str(name) for name in document["classes"])
        fields["class_counts"] = tuple(int(count) for count in document["class_counts"])
        fields["row_groups"] = tuple(RowGroup(**group) for group in document["row_groups"])
        fields["image_stats"] = ImageStats(**document["image_stats"])
        fields["skipped"] = tuple(SkippedPhoto(**photo) for photo in document["skipped"])
        manifest = DatasetManifest(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where}: not a manifest that Paceline wrote: {error!r}") from None
    _check(manifest, where)
    return manifest


def _check(manifest: DatasetManifest, where: str) -> None:
    expected_id = 0
    for group in manifest.row_groups:
        if group.first_sample_id != expected_id or group.rows < 1:
            raise DataError(f"{where}: row group {group.file}: sample ids do not follow each other")
        if PurePosixPath(group.file).name != group.file or group.file.startswith("."):
            raise DataError(f"{where}: row group file {group.file!r} is not a plain name")
        expected_id += group.rows
    counts_agree = expected_id == manifest.samples == sum(manifest.class_counts) and len(
        manifest.classes
    ) == len(manifest.class_counts)
    if not counts_agree or not manifest.row_groups:
        raise DataError(
            f"{where}: expected row groups and classes to hold the same samples, got "
            f"{expected_id} in row groups, {sum(manifest.class_counts)} in classes, "
            f"{manifest.samples} in all"
        )
