"""The manifest of a data set: its fields and files, in which order, with checksums.

The file is `_paceline_manifest.json` in the data set's folder, or in a folder of its own that names
the location of the data. Parquet readers ignore names that begin with an underscore.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic import Field as Value

from paceline.base.errors import DataError
from paceline.plan.spec.sentences import first_of
from paceline.train.data.fields import Field

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
