"""Mode `memory`: the images that the training uses, decoded once per node and kept as uint8."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import cv2
import numpy as np

from paceline.data.batches import Batch, Feed, FeedOptions, augment
from paceline.data.images import decode
from paceline.data.node import NodeMemory, NodeShare, node_memory
from paceline.data.row_groups import RowGroupReader, RowGroupRows

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from paceline.data.dataset import Dataset
    from paceline.plan.sample_order import SampleOrder

_ATTACH_S = 120.0


class MemoryFeed(Feed):
    """Batches from one buffer of decoded images, shared by the ranks of the node.

    Opening it decodes: the node's ranks divide the row groups among themselves, and wait for each
    other for at most `timeout_s`. A rank alone on its node keeps only its own samples.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: SampleOrder,
        options: FeedOptions,
        share: NodeShare,
        timeout_s: float,
    ) -> None:
        self._order, self._options = order, options
        alone = share.ranks_on_node == 1
        place = (options.rank, options.world_size) if alone else (0, 1)
        self._used = order.used_sample_ids(*place)
        samples = len(self._used)
        image_bytes = samples * options.image_size**2 * 3
        label_bytes = samples * np.dtype(np.int32).itemsize
        memory = node_memory(share, image_bytes + label_bytes, _ATTACH_S)
        self._images = np.frombuffer(memory.buffer, np.uint8, image_bytes).reshape(
            samples, options.image_size, options.image_size, 3
        )
        self._labels = np.frombuffer(memory.buffer, np.int32, samples, offset=image_bytes)
        self._fill(dataset, self._row_groups_to_decode(share, memory))
        if memory.shared:
            share.barrier(timeout_s)
        super().__init__(self._batches, options.prefetch_batches)

    def close(self) -> None:
        """End the thread and release the memory. Raises TimedOut if the thread hangs."""
        super().close()
        self._images, self._labels = self._images[:0].copy(), self._labels[:0].copy()

    def _row_groups_to_decode(self, share: NodeShare, memory: NodeMemory) -> list[int]:
        """Return every k-th of the used row groups, or all if the memory is not shared."""
        used = self._order.row_groups_of(self._used)
        return used[share.local_rank :: share.ranks_on_node] if memory.shared else used

    def _fill(self, dataset: Dataset, groups: Sequence[int]) -> None:
        cv2.setNumThreads(0)
        with ThreadPoolExecutor(self._options.decode_threads, "paceline-decode") as pool:
            for rows in RowGroupReader(dataset).read(groups):
                first, count = rows.first_sample_id, len(rows.images)
                low, high = np.searchsorted(self._used, (first, first + count))
                list(pool.map(lambda slot, rows=rows: self._place(rows, slot), range(low, high)))

    def _place(self, rows: RowGroupRows, slot: int) -> None:
        sample_id = int(self._used[slot])
        self._images[slot] = decode(rows.image(sample_id), self._options.image_size)
        self._labels[slot] = rows.label(sample_id)

    def _batches(self, stopped: threading.Event) -> Iterator[Batch]:
        for number in range(self._order.steps):
            if stopped.is_set():
                return
            step = self._order.step(number)
            ids = step.share(self._options.rank, self._options.world_size)
            slots = np.searchsorted(self._used, ids)
            images = self._pixels(slots, step.epoch, ids)
            yield Batch(step.step, step.epoch, ids, images, self._labels[slots].astype(np.int64))

    def _pixels(
        self, slots: NDArray[np.intp], epoch: int, ids: NDArray[np.int64]
    ) -> NDArray[np.uint8]:
        if not self._options.pixels:
            return np.empty((len(ids), 0, 0, 3), dtype=np.uint8)
        images = self._images[slots]
        augment(images, self._options.augment, self._order.seed, epoch, ids)
        return images
