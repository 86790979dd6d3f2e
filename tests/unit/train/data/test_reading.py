"""Both reading modes give every rank exactly the planned samples, and fail cleanly."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.thread_ranks import ThreadNode

from paceline.base.errors import DataError, EnvironmentLacks, UsageError
from paceline.collectives.node import memory as node_module
from paceline.plan.trials.sample_order import SampleOrder, SampleRandom
from paceline.train.data import batches as batches_module
from paceline.train.data.batches import (
    Batch,
    Feed,
    FeedOptions,
    SoloNode,
    mirror_at_random,
    open_feed,
)
from paceline.train.data.dataset import Dataset, inspect_dataset, open_dataset
from paceline.train.data.images import decode
from paceline.train.data.row_groups import ParquetSource

MadeDataset = Any  # of conftest.py, which cannot be imported
SIZE = 24
COLUMNS = {"sample_id", "label", "image", "sha256", "source"}


def images_of(dataset: Dataset) -> ParquetSource:
    return ParquetSource(dataset, "image", "label", image_size=SIZE)


def sample_order_of(dataset: MadeDataset, **changes: int) -> SampleOrder:
    rows = open_dataset(dataset.path).row_group_rows
    values = {"seed": 7, "global_batch": 5, "epochs": 2, "window_row_groups": 2} | changes
    return SampleOrder(row_group_rows=rows, **values)


def feed_all(dataset: MadeDataset, order: SampleOrder, mode: Any, world: int) -> list[list[Batch]]:
    """The batches of every rank, ranks running at the same time as on one node."""
    node = ThreadNode(world)

    def run(rank: int) -> list[Batch]:
        feed = open_feed(
            images_of(open_dataset(dataset.path)),
            order,
            FeedOptions(rank, world, decode_threads=2, augment=mirror_at_random),
            mode=mode,
            share_of_node=node.of(rank) if world > 1 else SoloNode(),
            timeout_s=30,
        )
        with feed:
            return list(feed)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


@pytest.mark.contract
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("mode", ["memory", "stream"])
@pytest.mark.parametrize("max_steps", [None, 3, 7])
def test_ranks_together_get_the_planned_samples_and_pixels(uneven, mode, world, max_steps) -> None:
    order = sample_order_of(uneven, **({} if max_steps is None else {"max_steps": max_steps}))
    fed = feed_all(uneven, order, mode, world)
    assert all(len(batches) == order.steps for batches in fed)
    for number in range(order.steps):
        parts = [batches[number] for batches in fed]
        expected = order.step(number)
        assert np.concatenate([p.sample_ids for p in parts]).tolist() == list(expected.sample_ids)
        sizes = [len(p.sample_ids) for p in parts]
        assert max(sizes) - min(sizes) <= 1
        for part in parts:
            assert (part.step, part.epoch) == (number, expected.epoch)
            assert part.inputs.shape == (len(part.sample_ids), SIZE, SIZE, 3)
            assert part.inputs.dtype == np.uint8
            assert part.targets.dtype == np.int64
            for row, sample_id in enumerate(part.sample_ids.tolist()):
                pixels = decode(uneven.images[sample_id], SIZE)
                if SampleRandom(7, part.epoch, sample_id).coin:
                    pixels = pixels[:, ::-1]
                assert part.inputs is not None
                assert np.array_equal(part.inputs[row], pixels)
                assert part.targets[row] == uneven.labels[sample_id]


@pytest.mark.contract
@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_every_sample_is_seen_once_an_epoch(uneven: MadeDataset, mode: Any) -> None:
    fed = feed_all(uneven, sample_order_of(uneven), mode, 2)
    seen = Counter((b.epoch, i) for batches in fed for b in batches for i in b.sample_ids.tolist())
    assert seen == Counter((epoch, i) for epoch in range(2) for i in range(23))


@pytest.mark.parametrize("mode", ["memory", "stream"])
@pytest.mark.parametrize("first_step", [1, 4, 7])
def test_training_that_continues_gets_the_batches_of_its_later_steps(
    uneven, mode, first_step
) -> None:
    order = sample_order_of(uneven)
    source = images_of(open_dataset(uneven.path))
    place = FeedOptions(1, 2)
    with open_feed(source, order, place, mode=mode) as feed:
        wanted = [batch for batch in feed if batch.step >= first_step]
    with open_feed(source, order.since(first_step), place, mode=mode) as feed:
        found = list(feed)
    assert [b.step for b in found] == list(range(first_step, order.steps))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.sample_ids.tolist() == theirs.sample_ids.tolist()
        assert np.array_equal(ours.inputs, theirs.inputs)
        assert np.array_equal(ours.targets, theirs.targets)


@pytest.mark.contract
@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_ranks_beyond_the_last_batch_get_empty_batches(uneven: MadeDataset, mode: Any) -> None:
    order = sample_order_of(uneven, global_batch=11, epochs=1)  # 23 = 11 + 11 + 1
    last = [batches[-1] for batches in feed_all(uneven, order, mode, 3)]
    assert [len(batch.sample_ids) for batch in last] == [1, 0, 0]
    assert last[2].inputs.shape == (0, SIZE, SIZE, 3)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Images that reading mode `memory` has decoded."""
    found: list[bytes] = []

    def counting(data: bytes, image_size: int, *, others: bool = False) -> Any:
        found.append(data)
        return decode(data, image_size)

    monkeypatch.setattr("paceline.train.data.manifest.decode", counting)
    return found


def test_memory_mode_decodes_each_used_image_once_a_node(uneven, decoded) -> None:
    order = sample_order_of(uneven, max_steps=2)
    feed_all(uneven, order, "memory", 3)
    used = [uneven.images[i] for i in order.used_sample_ids()]
    assert sorted(decoded) == sorted(used)
    assert len(used) == 10


def test_a_rank_alone_on_its_node_decodes_its_own_samples_only(uneven, decoded) -> None:
    order = sample_order_of(uneven, max_steps=2)
    images = images_of(open_dataset(uneven.path))
    with open_feed(images, order, FeedOptions(1, 2), mode="memory") as feed:
        seen = [i for batch in feed for i in batch.sample_ids.tolist()]
    assert sorted(decoded) == sorted(uneven.images[i] for i in seen)


def test_ranks_that_cannot_share_memory_decode_alone(uneven, monkeypatch) -> None:
    shared = feed_all(uneven, sample_order_of(uneven), "memory", 2)
    attach = node_module._attach
    monkeypatch.setattr(node_module, "_attach", lambda text: attach("/proc/1/fd/99999 " + "0" * 32))
    private = feed_all(uneven, sample_order_of(uneven), "memory", 2)
    for ours, theirs in zip(shared, private, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert np.array_equal(a.inputs, b.inputs)


def test_memory_of_another_process_under_the_same_name_is_not_taken(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"\0" * 4096)
    assert node_module._attach(f"{other} {'ab' * 16}") is None


def test_shared_memory_leaves_no_descriptor_and_no_file(uneven: MadeDataset) -> None:
    feed_all(uneven, sample_order_of(uneven), "memory", 2)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        feed_all(uneven, sample_order_of(uneven), "memory", 2)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_too_little_memory_proposes_the_stream_mode_on_every_rank(uneven, monkeypatch) -> None:
    monkeypatch.setattr(node_module, "available_bytes", lambda: 1000)
    node = ThreadNode(2)
    for rank in (0, 1):
        with pytest.raises(EnvironmentLacks, match='"stream"'):
            open_feed(
                images_of(open_dataset(uneven.path)),
                sample_order_of(uneven),
                FeedOptions(rank, 2),
                mode="memory",
                share_of_node=node.of(rank),
            )


def open_feed_of(dataset: Dataset, order: SampleOrder, mode: Any) -> Feed:
    """The feed of a single rank."""
    return open_feed(images_of(dataset), order, FeedOptions(0, 1), mode=mode)


def read_all(folder: Path, mode: Any) -> list[Batch]:
    """One epoch of one rank."""
    dataset = open_dataset(folder)
    order = SampleOrder(dataset.row_group_rows, seed=7, global_batch=5, epochs=1)
    with open_feed_of(dataset, order, mode) as feed:
        return list(feed)


def pages(file: Path) -> dict[str, tuple[int, int]]:
    """First and last byte of every page of every column chunk, by column and kind."""
    row_group = pq.ParquetFile(file).metadata.row_group(0)
    found = {}
    for number in range(row_group.num_columns):
        column = row_group.column(number)
        start = data = column.data_page_offset
        if column.has_dictionary_page:
            start = column.dictionary_page_offset
            found[f"{column.path_in_schema} dictionary"] = (start, data)
        found[f"{column.path_in_schema} data"] = (data, start + column.total_compressed_size)
    return found


@pytest.mark.contract
@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_a_damaged_page_of_any_column_is_detected(uneven: MadeDataset, mode: Any) -> None:
    file = uneven.path / "part-00001.parquet"
    data = file.read_bytes()
    found = pages(file)
    assert {name.split()[0] for name in found} == COLUMNS
    try:
        for first, end in found.values():
            for position in (first, (first + end) // 2, end - 1):
                changed = bytearray(data)
                changed[position] ^= 1
                file.write_bytes(changed)
                for read in (inspect_dataset, lambda path: read_all(path, mode)):
                    with pytest.raises(DataError, match=r"part-00001\.parquet: expected sha256"):
                        read(uneven.path)
    finally:
        file.write_bytes(data)


@pytest.mark.contract
@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_a_changed_label_is_detected(dataset_of_rows: Any, mode: Any) -> None:
    """The value in the page, not only its encoding, is changed: 0 (fire) becomes 2 (smoke)."""
    made, changed = dataset_of_rows(5, 4), dataset_of_rows(5, 4, first_label=2)
    assert made.labels[0] == 0
    name = "part-00000.parquet"
    padding = (made.path / name).stat().st_size - (changed.path / name).stat().st_size
    assert padding == 0
    (made.path / name).write_bytes((changed.path / name).read_bytes())
    with pytest.raises(DataError, match=r"part-00000\.parquet: expected sha256"):
        read_all(made.path, mode)


@pytest.mark.contract
@pytest.mark.parametrize("mode", ["memory", "stream"])
@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_that_is_no_class_is_refused(dataset_of_rows: Any, mode: Any, label: int) -> None:
    made = dataset_of_rows(5, 4, first_label=label)
    with pytest.raises(DataError, match=r"part-00000.*\(row group 0\): field label: .* 0\.\.2"):
        read_all(made.path, mode)


@pytest.mark.contract
@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_a_file_that_disappears_while_training_is_named(uneven, tmp_path, mode) -> None:
    shutil.copytree(uneven.path, tmp_path / "set")
    dataset = open_dataset(tmp_path / "set")
    (tmp_path / "set" / "part-00003.parquet").unlink()
    order = sample_order_of(uneven)
    with pytest.raises(DataError, match=r"part-00003.*cannot be read"):
        list(open_feed_of(dataset, order, mode))


@pytest.mark.contract
@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_rows_that_are_missing_are_detected(uneven: MadeDataset, tmp_path: Path, mode: Any) -> None:
    """As if Petastorm dropped a row: the checksum is right, but the middle row is missing."""
    folder = tmp_path / "short"
    shutil.copytree(uneven.path, folder)
    opened = open_dataset(folder)
    file = folder / "part-00002.parquet"
    table = pq.read_table(file, use_legacy_dataset=False)
    pq.write_table(pa.concat_tables([table.slice(0, 1), table.slice(2)]), file)
    files = list(opened.manifest.files)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    files[2] = files[2].model_copy(update={"sha256": sha256})
    manifest = opened.manifest.model_copy(update={"files": tuple(files)})
    short = dataclasses.replace(opened, manifest=manifest)
    with pytest.raises(DataError, match=r"part-00002.*\(row group 2\): .* 8..11, got 3 rows"):
        list(open_feed_of(short, sample_order_of(uneven), mode))


def test_closing_early_ends_the_threads(uneven: MadeDataset) -> None:
    for _ in range(3):
        order = sample_order_of(uneven, epochs=100)
        feed = open_feed_of(open_dataset(uneven.path), order, "stream")
        assert next(iter(feed)).step == 0
        feed.close()
        feed.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("paceline-")]


def test_a_consumer_that_closed_the_feed_meanwhile_is_let_go(uneven: MadeDataset) -> None:
    order = sample_order_of(uneven, epochs=100)
    with open_feed_of(open_dataset(uneven.path), order, "stream") as feed:
        batches = iter(feed)
        next(batches)
    assert list(batches) == []


def test_a_feed_stays_within_its_bound() -> None:
    made = []

    def make(stopped: threading.Event) -> Iterator[Batch]:
        for step in range(100):
            made.append(step)
            empty = np.empty(0, np.int64)
            yield Batch(step, 0, empty, np.empty((0, 1, 1, 3), np.uint8), empty)

    feed = batches_module.Feed(make)
    deadline = time.monotonic() + 10
    while len(made) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == 3  # two ready, one in hand
    feed.close()


def test_an_order_of_another_data_set_is_refused(uneven: MadeDataset) -> None:
    order = SampleOrder(row_group_rows=(23,), seed=0, global_batch=4, epochs=1)
    with pytest.raises(UsageError, match="other row groups"):
        open_feed_of(open_dataset(uneven.path), order, "memory")


def test_opencv_gets_no_threads_of_its_own(uneven: MadeDataset) -> None:
    feed_all(uneven, sample_order_of(uneven, epochs=1), "stream", 1)
    assert cv2.getNumThreads() == 1
