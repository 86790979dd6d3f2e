"""A small data set in the layout that ingest writes, made without Spark."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.measure.records.files import write_json
from paceline.train.data import synth
from paceline.train.data.ingest import petastorm_schema
from paceline.train.data.manifest import (
    MANIFEST_NAME,
    DataFile,
    DatasetManifest,
    ImageStats,
    image_fields,
)

UNISCHEMA_KEY = b"dataset-toolkit.unischema.v1"
ROW_GROUPS_KEY = b"dataset-toolkit.num_row_groups_per_file.v1"


@dataclass(frozen=True)
class MadeDataset:
    path: Path
    images: list[bytes]  # by sample id
    labels: list[int]


def make_dataset(
    folder: Path, rows: Sequence[int], *, schema_pickle: bytes = b"", first_label: int | None = None
) -> MadeDataset:
    """Write a data set whose row groups have the given numbers of rows.

    schema_pickle: replaces Petastorm's schema in every file in which Petastorm might look for it.
    first_label: label of sample 0 in its file; the manifest keeps the right class counts.
    """
    folder.mkdir(parents=True)
    images = [synth.image_bytes("tiny", 0, index) for index in range(sum(rows))]
    labels = [synth.CLASSES.index(synth.class_of(index)) for index in range(sum(rows))]
    stored = labels if first_label is None else [first_label, *labels[1:]]
    schema_pickle = schema_pickle or pickle.dumps(petastorm_schema())
    names = [f"part-{number:05d}.parquet" for number in range(len(rows))]
    metadata = {UNISCHEMA_KEY: schema_pickle, ROW_GROUPS_KEY: json.dumps(dict.fromkeys(names, 1))}
    files, first = [], 0
    for name, count in zip(names, rows, strict=True):
        ids = list(range(first, first + count))
        table = pa.table(
            {
                "sample_id": pa.array(ids, pa.int64()),
                "label": pa.array([stored[i] for i in ids], pa.int32()),
                "image": pa.array([images[i] for i in ids], pa.binary()),
                "sha256": [hashlib.sha256(images[i]).hexdigest() for i in ids],
                "source": [f"x/{i}.jpg" for i in ids],
            },
            metadata=metadata,
        )
        pq.write_table(table, folder / name, compression="none")
        data = (folder / name).read_bytes()
        files.append(
            DataFile(
                path=name,
                row_group_rows=(count,),
                size_bytes=len(data),
                sha256=hashlib.sha256(data).hexdigest(),
            )
        )
        first += count
    for name in ("_common_metadata", "_metadata"):
        pq.write_metadata(table.schema, folder / name)
    size = sum(map(len, images))
    manifest = DatasetManifest(
        fields=image_fields(3),
        id_field="sample_id",
        classes=synth.CLASSES,
        class_counts=tuple(labels.count(label) for label in range(3)),
        samples=len(images),
        seed=0,
        content_sha256="0" * 64,
        files=tuple(files),
        image_stats=ImageStats(
            total_bytes=size,
            mean_bytes=size // len(images),
            width_min=120,
            width_max=320,
            height_min=120,
            height_max=320,
            reencoded=0,
        ),
        skipped=(),
        versions={},
        created="2026-01-01T00:00:00+00:00",
    )
    write_json(folder / MANIFEST_NAME, manifest.as_json())
    return MadeDataset(folder, images, labels)


@pytest.fixture(scope="session")
def dataset_of_rows(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., MadeDataset]:
    """Make a new data set whose row groups have the given numbers of rows."""

    def make(*rows: int, **changes: Any) -> MadeDataset:
        return make_dataset(tmp_path_factory.mktemp("made") / "dataset", rows, **changes)

    return make


@pytest.fixture(scope="session")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> MadeDataset:
    """23 images in six row groups of different sizes."""
    return make_dataset(tmp_path_factory.mktemp("uneven") / "a b%20ü", (5, 3, 4, 1, 6, 4))
