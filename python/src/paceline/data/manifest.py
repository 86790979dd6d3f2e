"""The manifest of a data set: what it contains, in which order, with checksums.

The file is `_paceline_manifest.json` in the data set's folder. Parquet readers ignore names that
begin with an underscore.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.errors import DataError

MANIFEST_NAME = "_paceline_manifest.json"
SCHEMA_VERSION = 1


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RowGroup(_Model):
    """One Parquet file, which contains one row group."""

    file: str  # name within the data set
    rows: int = Field(ge=1)
    first_sample_id: int  # its samples are first_sample_id .. first_sample_id + rows - 1
    size_bytes: int
    sha256: str  # of the file


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
    """Everything about a data set except its samples."""

    schema_version: int = Field(default=SCHEMA_VERSION, alias="schema")
    classes: tuple[str, ...]  # label i is classes[i]
    class_counts: tuple[int, ...]
    samples: int
    seed: int  # of the order of the samples
    content_sha256: str  # over (sample id, label, sha256 of the image) in order
    row_groups: tuple[RowGroup, ...]
    image_stats: ImageStats
    skipped: tuple[SkippedImage, ...]
    versions: dict[str, str]
    created: str  # ISO 8601, UTC

    def as_json(self) -> dict[str, Any]:
        """Return the document that `from_json` reads."""
        return self.model_dump(mode="json", by_alias=True)

    @model_validator(mode="after")
    def _check(self) -> Self:
        expected_id = 0
        for group in self.row_groups:
            if group.first_sample_id != expected_id:
                raise ValueError(f"row group {group.file}: sample ids are not consecutive")
            if PurePosixPath(group.file).name != group.file or group.file.startswith("."):
                raise ValueError(f"row group file {group.file!r} is not a plain name")
            expected_id += group.rows
        in_classes = sum(self.class_counts)
        if not self.row_groups or not expected_id == self.samples == in_classes:
            raise ValueError(
                "expected row groups and classes to contain the same samples, got "
                f"{expected_id} in row groups, {in_classes} in classes, {self.samples} in total"
            )
        if len(self.classes) != len(self.class_counts):
            raise ValueError(f"{len(self.classes)} classes, but {len(self.class_counts)} counts")
        return self


def from_json(document: dict[str, Any], where: str) -> DatasetManifest:
    """Return the manifest in `document`. Raises DataError with `where` and what is wrong."""
    version = document.get("schema")
    if version != SCHEMA_VERSION:
        raise DataError(
            f"{where}: expected manifest schema {SCHEMA_VERSION}, got {version!r}; ingest the "
            "images again with `paceline data ingest` of this version"
        )
    try:
        return DatasetManifest.model_validate(document)
    except ValidationError as error:
        faults = "; ".join(
            ": ".join(filter(None, (".".join(map(str, fault["loc"])), fault["msg"])))
            for fault in error.errors()
        )
        raise DataError(f"{where}: not a valid manifest of a Paceline data set: {faults}") from None
