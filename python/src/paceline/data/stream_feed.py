"""Mode `stream`: bounded memory; images are read and decoded while the training runs.

A rank keeps the encoded images of its samples of one shuffle window, and reads those of the next
window meanwhile. Decoded batches are prepared `prefetch_batches` ahead.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import cv2
import numpy as np

from paceline.data.batches import Batch, Feed, FeedOptions, augment
from paceline.data.images import decode
from paceline.data.row_groups import RowGroupReader
from paceline.plan.sample_order import share_bounds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from paceline.data.dataset import Dataset
    from paceline.plan.sample_order import GlobalStep, SampleOrder

Encoded = dict[int, tuple[bytes, int]]  # sample id -> encoded image, label


class StreamFeed(Feed):
    """Batches decoded when they are needed; a rank decodes its own samples only."""

    def __init__(self, dataset: Dataset, order: SampleOrder, options: FeedOptions) -> None:
        self._row_groups = RowGroupReader(dataset)
        self._order, self._options = order, options
        super().__init__(self._batches, options.prefetch_batches)

    def _batches(self, stopped: threading.Event) -> Iterator[Batch]:
        cv2.setNumThreads(0)
        with (
            ThreadPoolExecutor(1, "paceline-read") as reader,
            ThreadPoolExecutor(self._options.decode_threads, "paceline-decode") as decoders,
        ):
            loaded: Encoded = {}
            windows = self._windows(reader, stopped)
            for number in range(self._order.steps):
                if stopped.is_set():
                    return
                step = self._order.step(number)
                ids = step.share(self._options.rank, self._options.world_size)
                while not all(sample_id in loaded for sample_id in ids.tolist()):
                    loaded |= next(windows)
                samples = [loaded.pop(sample_id) for sample_id in ids.tolist()]
                yield self._batch(step, ids, samples, decoders)

    def _batch(
        self,
        step: GlobalStep,
        ids: NDArray[np.int64],
        samples: list[tuple[bytes, int]],
        decoders: ThreadPoolExecutor,
    ) -> Batch:
        size = self._options.image_size if self._options.pixels else 0
        images = np.empty((len(ids), size, size, 3), dtype=np.uint8)
        if size:
            pixels = decoders.map(lambda sample: decode(sample[0], size), samples)
            for row, image in enumerate(pixels):
                images[row] = image
        if size:
            augment(images, self._options.augment, self._order.seed, step.epoch, ids)
        labels = np.array([label for _, label in samples], dtype=np.int64)
        return Batch(step.step, step.epoch, ids, images, labels)

    def _windows(self, reader: ThreadPoolExecutor, stopped: threading.Event) -> Iterator[Encoded]:
        """Yield this rank's images by window; the next window is read while one is used."""
        upcoming: Future[Encoded] | None = None
        for own in self._samples_by_window():
            current, upcoming = upcoming, reader.submit(self._load, own, stopped)
            if current is not None:
                yield current.result()
            if stopped.is_set():
                return
        if upcoming is not None:
            yield upcoming.result()

    def _samples_by_window(self) -> Iterator[set[int]]:
        """Yield this rank's samples in each window that the training reaches, unless empty."""
        remaining, epoch = self._order.steps, 0
        while remaining > 0:
            steps = min(remaining, self._order.steps_per_epoch)
            mine = self._own_positions(steps)
            start = 0
            for window in self._order.windows(epoch):
                end = start + len(window.sample_ids)
                if own := set(window.sample_ids[mine[start:end]].tolist()):
                    yield own
                start = end
            remaining -= steps
            epoch += 1

    def _own_positions(self, steps: int) -> NDArray[np.bool_]:
        """Return the positions in an epoch's order that this rank gets in its first `steps`."""
        batch, samples = self._order.global_batch, self._order.samples
        mine = np.zeros(samples, dtype=bool)
        for start in range(0, steps * batch, batch):
            size = min(batch, samples - start)
            low, high = share_bounds(size, self._options.rank, self._options.world_size)
            mine[start + low : start + high] = True
        return mine

    def _load(self, own: set[int], stopped: threading.Event) -> Encoded:
        """Read a window's row groups and keep own samples; stop early if the feed is closed."""
        kept: Encoded = {}
        for rows in self._row_groups.read(self._order.row_groups_of(list(own))):
            if stopped.is_set():
                break
            first = rows.first_sample_id
            for sample_id in own.intersection(range(first, first + len(rows.images))):
                image = rows.image(sample_id) if self._options.pixels else b""
                kept[sample_id] = (image, rows.label(sample_id))
        return kept
