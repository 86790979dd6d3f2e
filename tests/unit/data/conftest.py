"""A small data set in the layout that ingest writes, made without Spark in no time."""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.data import synth
from paceline.data.ingest_schema import SCHEMA
from paceline.data.manifest import MANIFEST_NAME, DatasetManifest, ImageStats, RowGroup
from paceline.records.files import write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

UNISCHEMA_KEY = b"dataset-toolkit.unischema.v1"
ROW_GROUPS_KEY = b"dataset-toolkit.num_row_groups_per_file.v1"


@dataclass(frozen=True)
class MadeDataset:
    path: Path
    photos: list[bytes]  # by sample id
    labels: list[int]


def write_metadata(folder: Path, schema: pa.Schema, schema_pickle: bytes, files: list[str]) -> None:
    metadata = {UNISCHEMA_KEY: schema_pickle, ROW_GROUPS_KEY: json.dumps(dict.fromkeys(files, 1))}
    pq.write_metadata(schema.with_metadata(metadata), folder / "_common_metadata")


def make_dataset(folder: Path, rows: Sequence[int], seed: int = 0) -> MadeDataset:
    folder.mkdir(parents=True)
    photos = [synth.image_bytes("tiny", seed, index) for index in range(sum(rows))]
    labels = [synth.CLASSES.index(synth.class_of(index)) for index in range(sum(rows))]
    groups, first = [], 0
    for number, count in enumerate(rows):
        ids = list(range(first, first + count))
        table = pa.table(
            {
                "sample_id": pa.array(ids, pa.int64()),
                "label": pa.array([labels[i] for i in ids], pa.int32()),
                "image": pa.array([photos[i] for i in ids], pa.binary()),
                "sha256": [hashlib.sha256(photos[i]).hexdigest() for i in ids],
                "source": [f"x/{i}.jpg" for i in ids],
            }
        )
        file = folder / f"part-{number:05d}.parquet"
        pq.write_table(table, file, compression="none")
        data = file.read_bytes()
        groups.append(
            RowGroup(file.name, count, first, len(data), hashlib.sha256(data).hexdigest())
        )
        first += count
    write_metadata(folder, table.schema, pickle.dumps(SCHEMA), [g.file for g in groups])
    size = sum(map(len, photos))
    manifest = DatasetManifest(
        classes=synth.CLASSES,
        class_counts=tuple(labels.count(label) for label in range(3)),
        samples=len(photos),
        seed=seed,
        content_sha256="0" * 64,
        row_groups=tuple(groups),
        image_stats=ImageStats(size, size // len(photos), 120, 320, 120, 320, 0),
        skipped=(),
        versions={},
        created="2026-01-01T00:00:00+00:00",
    )
    write_json(folder / MANIFEST_NAME, manifest.as_json())
    return MadeDataset(folder, photos, labels)


@pytest.fixture(scope="session")
def dataset_of_rows(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., MadeDataset]:
    """Makes a new data set whose row groups have the given numbers of rows."""

    def make(*rows: int) -> MadeDataset:
        return make_dataset(tmp_path_factory.mktemp("made") / "dataset", rows)

    return make


@pytest.fixture(scope="session")
def replace_schema_pickle() -> Callable[[Path, bytes], None]:
    """Puts other bytes in the place of a data set's pickled schema."""

    def replace(folder: Path, schema_pickle: bytes) -> None:
        files = sorted(file.name for file in folder.glob("*.parquet"))
        schema = pq.read_schema(folder / files[0]).remove_metadata()
        write_metadata(folder, schema, schema_pickle, files)

    return replace


@pytest.fixture(scope="session")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> MadeDataset:
    """23 photos in six row groups of different sizes."""
    return make_dataset(tmp_path_factory.mktemp("uneven") / "a b%20ü", (5, 3, 4, 1, 6, 4))
