"""Parquet files and Petastorm data sets of users: registered as they are, and read exactly."""

from __future__ import annotations

import io
import pickle
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.base.errors import DataError, EnvironmentLacks, UsageError
from paceline.plan.trials.sample_order import SampleOrder
from paceline.train.data import synth
from paceline.train.data.batches import Batch, FeedOptions, open_feed
from paceline.train.data.dataset import inspect_dataset, open_dataset
from paceline.train.data.images import decode
from paceline.train.data.manifest import MANIFEST_NAME, decode_column, field_of
from paceline.train.data.register import register
from paceline.train.data.row_groups import ParquetSource

RNG = np.random.default_rng(3)
ROWS = 23
ARRAYS = RNG.standard_normal((ROWS, 3, 4))
SQUEEZED = RNG.integers(-9, 9, (ROWS, 2, 2, 2), dtype=np.int16)
LISTS = RNG.standard_normal((ROWS, 5)).astype(np.float32)
LABELS = np.arange(ROWS, dtype=np.int32) % 4
SIZE = 16
IMAGES = [synth.image_bytes("tiny", 0, index) for index in range(ROWS)]


def npy(array: np.ndarray) -> bytes:
    """What Petastorm's NdarrayCodec writes."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(array: np.ndarray) -> bytes:
    """What Petastorm's CompressedNdarrayCodec writes."""
    file = io.BytesIO()
    np.savez_compressed(file, arr=array)
    return file.getvalue()


COLUMNS: dict[str, Any] = {
    "array": pa.array([npy(a) for a in ARRAYS], pa.binary()),
    "squeezed": pa.array([npz(a) for a in SQUEEZED], pa.binary()),
    "list": pa.array(LISTS.tolist(), pa.list_(pa.float32())),
    "picture": pa.array(IMAGES, pa.binary()),
    "label": pa.array(LABELS),
    "score": pa.array(ARRAYS[:, 0, 0]),
    "flag": pa.array(LABELS > 1),
}
DECODED: dict[str, Any] = {
    "array": ARRAYS.astype(np.float32),
    "squeezed": SQUEEZED,
    "list": LISTS,
    "picture": np.stack([decode(image, SIZE) for image in IMAGES]),
    "label": LABELS,
    "score": ARRAYS[:, 0, 0].astype(np.float32),
    "flag": LABELS > 1,
}


def write(folder: Path, columns: dict[str, Any], row_group_size: int = 4) -> Path:
    """Two files, in a folder and in one below it, with several row groups each."""
    table = pa.table(columns)
    (folder / "more").mkdir(parents=True)
    pq.write_table(table.slice(0, 13), folder / "a.parquet", row_group_size=row_group_size)
    pq.write_table(table.slice(13), folder / "more" / "b.parquet", row_group_size=row_group_size)
    return folder


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write(tmp_path_factory.mktemp("plain") / "set", COLUMNS)
    register(folder)
    return folder


def feed_all(folder: Path, fields: tuple[str, str], mode: Any, world: int) -> list[list[Batch]]:
    """All batches of one epoch, by rank; each rank is alone on its node."""
    source = ParquetSource(open_dataset(folder), *fields, image_size=SIZE)
    order = SampleOrder(source.row_group_rows, seed=5, global_batch=6, epochs=1)
    fed = []
    for rank in range(world):
        with open_feed(source, order, FeedOptions(rank, world), mode=mode) as feed:
            fed.append(list(feed))
    return fed


def test_fields_are_derived_from_schema_and_values(registered: Path) -> None:
    manifest = open_dataset(registered).manifest
    found = {f.name: (f.codec, f.dtype, f.shape, f.classes) for f in manifest.fields}
    assert found == {
        "array": ("array", "float64", (3, 4), None),
        "squeezed": ("compressed_array", "int16", (2, 2, 2), None),
        "list": ("list", "float32", (5,), None),
        "picture": ("image", "uint8", (), None),
        "label": ("scalar", "int32", (), 4),
        "score": ("scalar", "float64", (), None),
        "flag": ("scalar", "bool", (), None),
    }
    assert [(f.path, f.row_group_rows) for f in manifest.files] == [
        ("a.parquet", (4, 4, 4, 1)),
        ("more/b.parquet", (4, 4, 2)),
    ]
    assert inspect_dataset(registered)["checksums"] == "verified"


@pytest.mark.parametrize("mode", ["memory", "stream"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "fields",
    [("array", "squeezed"), ("squeezed", "list"), ("list", "label"), ("picture", "score"),
     ("label", "flag"), ("array", "array")],
)  # fmt: skip
def test_every_sample_is_fed_once_with_its_values(registered, fields, mode, world) -> None:
    fed = feed_all(registered, fields, mode, world)
    seen = []
    for batch in (batch for batches in fed for batch in batches):
        ids = batch.sample_ids
        seen += ids.tolist()
        expected = DECODED[fields[0]][ids]
        assert batch.inputs is not None
        assert batch.inputs.dtype == expected.dtype
        assert np.array_equal(batch.inputs, expected)
        targets = DECODED[fields[1]][ids]
        assert np.array_equal(batch.targets, targets)
        kinds = {"f": np.float32, "i": np.int64, "b": np.bool_}
        assert batch.targets.dtype == kinds[targets.dtype.kind]
    assert sorted(seen) == list(range(ROWS))


def test_later_pipeline_stages_get_no_inputs(registered: Path) -> None:
    for mode in ("memory", "stream"):
        source = ParquetSource(open_dataset(registered), "array", "label", image_size=SIZE)
        order = SampleOrder(source.row_group_rows, seed=5, global_batch=6, epochs=1)
        with open_feed(source, order, FeedOptions(0, 1, with_inputs=False), mode=mode) as feed:
            for batch in feed:
                assert batch.inputs is None
                assert np.array_equal(batch.targets, LABELS[batch.sample_ids])


def test_a_data_set_of_petastorms_own_writer_is_registered(tmp_path: Path) -> None:
    """Its pickled schema is replaced by one that would create a file."""
    mark = tmp_path / "executed"

    class Attack:
        def __reduce__(self) -> Any:
            return Path.touch, (mark,)

    folder = tmp_path / "set"
    folder.mkdir()
    table = pa.table({"x": COLUMNS["array"], "y": COLUMNS["label"]}).replace_schema_metadata(
        {b"dataset-toolkit.unischema.v1": pickle.dumps(Attack())}
    )
    pq.write_table(table, folder / "part-0.parquet", row_group_size=8)
    pq.write_metadata(table.schema, folder / "_common_metadata")
    (folder / ".part-0.parquet.crc").write_bytes(b"x")
    register(folder)
    (batches,) = feed_all(folder, ("x", "y"), "stream", 1)
    assert sum(len(batch.sample_ids) for batch in batches) == ROWS
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "column", "reason"),
    [
        ("text", pa.array(["a"] * ROWS), "values of type string"),
        ("nested", pa.array([[[1]]] * ROWS), "values of type list"),
        ("fixed", pa.array([[1]] * ROWS, pa.list_(pa.int64(), 1)), "type fixed_size_list"),
        ("bytes", pa.array([b"abc"] * ROWS), "bytes of an unknown kind"),
        ("objects", pa.array([npy(np.array([{}], object))] * ROWS), "not a NumPy file"),
        ("broken", pa.array([b"\x93NUMPY\x01"] * ROWS), "not a NumPy file"),
        ("image", pa.array([b"\xff\xd8\xff nothing"] * ROWS), "damaged: it begins like an image"),
        ("unsigned", pa.array([1] * ROWS, pa.uint64()), "values of type uint64"),
        ("first", pa.array([None] + [1] * (ROWS - 1)), "the first value is missing"),
        ("holes", pa.array([1] * (ROWS - 1) + [None]), "1 values are missing"),
    ],
)
def test_a_column_that_cannot_be_used_is_left_out_with_the_reason(
    tmp_path, name, column, reason
) -> None:
    folder = write(tmp_path / "set", {"label": COLUMNS["label"], name: column})
    manifest = register(folder)
    assert [field.name for field in manifest.fields] == ["label"]
    assert reason in manifest.ignored[name]
    with pytest.raises(UsageError) as caught:
        open_dataset(folder).field(name)
    assert f'expected a field "{name}", found label (int32)' in str(caught.value)
    assert f"the column {name} cannot be used: " in str(caught.value)


def test_a_codec_can_be_stated_where_the_bytes_do_not_show_it(tmp_path: Path) -> None:
    import cv2

    bmp = cv2.imencode(".bmp", np.zeros((9, 9, 3), np.uint8))[1].tobytes()
    folder = write(tmp_path / "set", {"x": pa.array([bmp] * ROWS), "y": COLUMNS["label"]})
    assert "--codec NAME=other_image" in register(folder).ignored["x"]
    manifest = register(folder, codecs={"x": "other_image"})
    assert manifest.ignored == {}
    (batches,) = feed_all(folder, ("x", "y"), "memory", 1)
    assert batches[0].inputs is not None
    assert batches[0].inputs.shape == (6, SIZE, SIZE, 3)
    with pytest.raises(UsageError, match="--codec x=image: a BMP image: expected JPEG or PNG"):
        register(folder, codecs={"x": "image"})
    with pytest.raises(UsageError, match="--codec x=array: not a NumPy file"):
        register(folder, codecs={"x": "array"})
    with pytest.raises(UsageError, match="--codec z: expected a column, one of x, y"):
        register(folder, codecs={"z": "image"})


@pytest.mark.parametrize("mode", ["memory", "stream"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (npy(np.zeros((4, 3))), r"expected arrays of float64 and shape \(3, 4\), got float64 and "),
        (npy(np.zeros((3, 4), np.int8))[:-1], "not a NumPy file"),
        (npy(np.array([{}], object)), "not a NumPy file"),
    ],
)
def test_a_value_that_is_not_as_described_is_reported(tmp_path, mode, value, message) -> None:
    values = [npy(a) for a in ARRAYS]
    values[17] = value
    folder = write(tmp_path / "set", {"x": pa.array(values), "y": COLUMNS["label"]})
    register(folder)
    with pytest.raises(DataError, match=message):
        feed_all(folder, ("x", "y"), mode, 1)


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ([1.0, 2.0, 3.0], r"expected lists of 2 values, one of 3 in .*\.parquet"),
        ([], "one of 0 in "),
        (None, "missing in "),
        ([1.0, None], r"values are missing \(null\) within lists in "),
    ],
)
def test_lists_of_different_lengths_are_no_field(
    tmp_path: Path, last: list[float | None] | None, reason: str
) -> None:
    lists = [*[[1.0, 2.0]] * (ROWS - 1), last]
    folder = write(tmp_path / "set", {"x": pa.array(lists), "y": COLUMNS["label"]})
    manifest = register(folder)
    assert [field.name for field in manifest.fields] == ["y"]
    assert re.search(reason, manifest.ignored["x"])
    with pytest.raises((DataError, UsageError), match=reason):
        feed_all(folder, ("x", "y"), "stream", 1)


def test_a_file_that_changed_after_registration_is_detected(registered, tmp_path) -> None:
    folder = shutil.copytree(registered, tmp_path / "set")
    file = folder / "more" / "b.parquet"
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"more/b\.parquet: expected sha256 .*data register"):
        feed_all(folder, ("list", "label"), "stream", 1)


def test_the_manifest_can_be_kept_in_another_place(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", {"x": COLUMNS["list"], "y": COLUMNS["label"]})
    register(folder, manifest_dir=tmp_path / "mine")
    assert not (folder / MANIFEST_NAME).exists()
    (batches,) = feed_all(tmp_path / "mine", ("x", "y"), "memory", 1)
    assert sum(len(batch.sample_ids) for batch in batches) == ROWS


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (shutil.rmtree, EnvironmentLacks, "no such data set"),
        (lambda f: [p.unlink() for p in f.rglob("*.parquet")], DataError, "expected Parquet files"),
        (lambda f: (f / "a.parquet").write_bytes(b"PAR1"), DataError, "a.parquet: expected a Par"),
        (
            lambda f: pq.write_table(pa.table({"z": [1]}), f / "z.parquet"),
            DataError,
            r"z\.parquet: expected the columns of the first file; different are x: list.*, z: int",
        ),
    ],
)
def test_files_that_are_no_data_set_are_refused(tmp_path, spoil, error, message) -> None:
    folder = write(tmp_path / "set", {"x": COLUMNS["list"], "y": COLUMNS["label"]})
    spoil(folder)
    with pytest.raises(error, match=message):
        register(folder)


def test_a_data_set_of_ingest_is_not_replaced(uneven: Any) -> None:
    with pytest.raises(UsageError, match="is registered already"):
        register(uneven.path)


@pytest.mark.parametrize(
    "arrays",
    [
        [a.copy() for a in ARRAYS],  # decoded at once
        [np.asfortranarray(a) for a in ARRAYS],  # stored column by column
        [np.asfortranarray(a) if i % 2 else a.copy() for i, a in enumerate(ARRAYS)],
        [a.astype(">f8") for a in ARRAYS],
        [np.array(a[0, 0]) for a in ARRAYS],  # no dimension
        [a[:0] for a in ARRAYS],  # no element
    ],
)
def test_arrays_are_decoded_however_they_are_stored(arrays: list[np.ndarray]) -> None:
    values = np.empty(ROWS, object)
    values[:] = [npy(array) for array in arrays]
    field = field_of("x", pa.chunked_array([pa.array(values[:1])]))
    out = np.empty((ROWS, *arrays[0].shape), np.float32)
    with ThreadPoolExecutor(2) as pool:
        decode_column(field, values, out, pool)
    assert np.array_equal(out, np.stack(arrays).astype(np.float32))


def test_decoding_uses_no_pool_for_plain_numbers(registered: Path) -> None:
    """A pool that is shut down would raise."""
    source = ParquetSource(open_dataset(registered), "list", "label", image_size=SIZE)
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    (rows,) = source.read([2], with_inputs=True)
    inputs, targets = np.empty((4, 5), np.float32), np.empty(4, np.int64)
    source.decode(np.arange(8, 12), rows.columns, inputs, targets, pool)
    assert np.array_equal(inputs, LISTS[8:12])
    assert np.array_equal(targets, LABELS[8:12])
