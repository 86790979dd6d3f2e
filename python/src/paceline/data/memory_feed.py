"""Mode `memory`: the photos that the training uses, decoded once a node and kept as uint8."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import cv2
import numpy as np

from paceline.data.batches import Batch, FeedOptions, Prefetcher, flip
from paceline.data.images import decode
from paceline.data.node import NodeMemory, NodeShare, node_memory
from paceline.data.row_groups import RowGroupRows, read_row_groups
from paceline.data.single_use import SingleUseFeed

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from paceline.data.dataset import Dataset
    from paceline.plan.schedule import Schedule

_ATTACH_S = 120.0
_LABEL_BYTES = 4  # int32


class MemoryFeed(SingleUseFeed):
    """Batches cut from one buffer of decoded photos, shared by the ranks of the node.

    Opening it decodes: the node's ranks split the row groups among themselves, and wait for one
    another for at most `timeout_s`.
    """

    def __init__(
        self,
        dataset: Dataset,
        schedule: Schedule,
        options: FeedOptions,
        share: NodeShare,
        timeout_s: float,
    ) -> None:
        self._schedule, self._options = schedule, options
        self._used = schedule.used_sample_ids()
        shape = (len(self._used), options.image_size, options.image_size, 3)
        image_bytes = int(np.prod(shape))
        memory = node_memory(share, image_bytes + _LABEL_BYTES * len(self._used), _ATTACH_S)
        self._images, self._labels = _arrays(memory.buffer, shape)
        self._fill(dataset, _own_groups(schedule, self._used, share, memory))
        if memory.shared:
            share.barrier(timeout_s)
        super().__init__(Prefetcher(self._batches, options.prefetch_batches))

    def close(self) -> None:
        """End the thread and give the memory back. Raises TimedOut if the thread hangs."""
        super().close()
        self._images, self._labels = self._images[:0].copy(), self._labels[:0].copy()

    def _fill(self, dataset: Dataset, groups: Sequence[int]) -> None:
        cv2.setNumThreads(0)
        with ThreadPoolExecutor(self._options.decode_threads, "paceline-decode") as pool:
            for rows in read_row_groups(dataset, groups):
                first, count = rows.first_sample_id, len(rows.images)
                low, high = np.searchsorted(self._used, (first, first + count))
                list(pool.map(lambda slot, rows=rows: self._place(rows, slot), range(low, high)))

    def _place(self, rows: RowGroupRows, slot: int) -> None:
        sample_id = int(self._used[slot])
        self._images[slot] = decode(rows.photo(sample_id), self._options.image_size)
        self._labels[slot] = rows.label(sample_id)

    def _batches(self, stopped: threading.Event) -> Iterator[Batch]:
        for number in range(self._schedule.steps):
            if stopped.is_set():
                return
            step = self._schedule.step(number)
            ids = step.share(self._options.rank, self._options.world_size)
            slots = np.searchsorted(self._used, ids)
            images = self._pixels(slots, step.epoch, ids)
            labels = self._labels[slots].astype(np.int64)
            yield Batch(step.step, step.epoch, ids, images, labels)

    def _pixels(
        self, slots: NDArray[np.intp], epoch: int, ids: NDArray[np.int64]
    ) -> NDArray[np.uint8]:
        if not self._options.pixels:
            return np.empty((len(ids), 0, 0, 3), dtype=np.uint8)
        images = self._images[slots]
        flip(images, self._schedule.seed, epoch, ids)
        return images


def _arrays(
    buffer: mmap.mmap, shape: tuple[int, int, int, int]
) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Views of the buffer: images of `shape`, then a label for each."""
    image_bytes = int(np.prod(shape))
    images = np.frombuffer(buffer, np.uint8, image_bytes).reshape(shape)
    labels = np.frombuffer(buffer, np.int32, shape[0], offset=image_bytes)
    return images, labels


def _own_groups(
    schedule: Schedule, used: NDArray[np.int64], share: NodeShare, memory: NodeMemory
) -> list[int]:
    """The row groups that this rank decodes: every k-th that is used, or all if alone."""
    starts = np.concatenate([[0], np.cumsum(schedule.row_group_rows)])
    found: list[int] = np.unique(np.searchsorted(starts, used, side="right") - 1).tolist()
    return found[share.local_rank :: share.ranks_on_node] if memory.shared else found
