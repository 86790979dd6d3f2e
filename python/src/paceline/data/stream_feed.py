"""Mode `stream`: bounded memory; photos are read and decoded beside the training.

Encoded photos of this rank's samples are held for one shuffle window, and those of the next one
are read meanwhile; decoded batches are held `prefetch_batches` ahead.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import cv2
import numpy as np

from paceline.data.batches import Batch, FeedOptions, Prefetcher, flip
from paceline.data.images import decode
from paceline.data.row_groups import read_row_groups
from paceline.data.single_use import SingleUseFeed
from paceline.plan.schedule import share_bounds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from paceline.data.dataset import Dataset
    from paceline.plan.schedule import Schedule

Encoded = dict[int, tuple[bytes, int]]  # sample id -> photo, label


class StreamFeed(SingleUseFeed):
    """Batches decoded as they are needed; only this rank's samples are decoded."""

    def __init__(self, dataset: Dataset, schedule: Schedule, options: FeedOptions) -> None:
        self._dataset, self._schedule, self._options = dataset, schedule, options
        super().__init__(Prefetcher(self._batches, options.prefetch_batches))

    def _batches(self, stopped: threading.Event) -> Iterator[Batch]:
        cv2.setNumThreads(0)
        with (
            ThreadPoolExecutor(1, "paceline-read") as reader,
            ThreadPoolExecutor(self._options.decode_threads, "paceline-decode") as decoders,
        ):
            held: Encoded = {}
            windows = self._windows(reader, stopped)
            for number in range(self._schedule.steps):
                if stopped.is_set():
                    return
                step = self._schedule.step(number)
                ids = step.share(self._options.rank, self._options.world_size)
                while not all(sample_id in held for sample_id in ids.tolist()):
                    held |= next(windows)
                yield self._batch(step.step, step.epoch, ids, held, decoders)

    def _batch(
        self,
        step: int,
        epoch: int,
        ids: NDArray[np.int64],
        held: Encoded,
        decoders: ThreadPoolExecutor,
    ) -> Batch:
        size = self._options.image_size if self._options.pixels else 0
        images = np.empty((len(ids), size, size, 3), dtype=np.uint8)
        labels = np.empty(len(ids), dtype=np.int64)

        def place(row: int, photo: bytes, label: int) -> None:
            if size:
                images[row] = decode(photo, size)
            labels[row] = label

        photos = [held.pop(sample_id) for sample_id in ids.tolist()]
        list(decoders.map(place, range(len(ids)), *zip(*photos, strict=True)) if photos else ())
        flip(images, self._schedule.seed, epoch, ids)
        return Batch(step, epoch, ids, images, labels)

    def _windows(self, reader: ThreadPoolExecutor, stopped: threading.Event) -> Iterator[Encoded]:
        """This rank's photos, window by window; the next window is read while one is used."""
        upcoming: Future[Encoded] | None = None
        for own in self._wanted():
            current, upcoming = upcoming, reader.submit(self._load, own, stopped)
            if current is not None:
                yield current.result()
            if stopped.is_set():
                return
        if upcoming is not None:
            yield upcoming.result()

    def _wanted(self) -> Iterator[set[int]]:
        """This rank's samples in each window that the training reaches, where it has any."""
        left = self._schedule.steps
        epoch = 0
        while left > 0:
            steps = min(left, self._schedule.steps_per_epoch)
            yield from self._wanted_in_epoch(epoch, steps)
            left -= steps
            epoch += 1

    def _wanted_in_epoch(self, epoch: int, steps: int) -> Iterator[set[int]]:
        batch, samples = self._schedule.global_batch, self._schedule.samples
        mine = np.zeros(samples, dtype=bool)  # by place in the epoch's order
        for step in range(steps):
            start = step * batch
            size = min(batch, samples - start)
            low, high = share_bounds(size, self._options.rank, self._options.world_size)
            mine[start + low : start + high] = True
        start = 0
        for window in self._schedule.windows(epoch):
            end = start + len(window.sample_ids)
            own = set(window.sample_ids[mine[start:end]].tolist())
            if own:
                yield own
            start = end

    def _load(self, own: set[int], stopped: threading.Event) -> Encoded:
        """Read a window's row groups, keeping own samples only; cut short if the feed is closed."""
        groups = sorted({self._schedule.row_group_of(sample_id) for sample_id in own})
        kept: Encoded = {}
        for rows in read_row_groups(self._dataset, groups):
            if stopped.is_set():
                break
            first = rows.first_sample_id
            for sample_id in range(first, first + len(rows.images)):
                if sample_id in own:
                    photo = rows.photo(sample_id) if self._options.pixels else b""
                    kept[sample_id] = (photo, rows.label(sample_id))
        return kept
