"""Batches of a rank, and a thread that prepares them ahead of the training."""

from __future__ import annotations

import math
import mmap
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from paceline.base.errors import EnvironmentLacks, TimedOut, UsageError
from paceline.collectives.message_schedules import share_bounds
from paceline.collectives.node.memory import (
    NodeShare,
    SoloNode,
    lack_of_memory,
    of_first,
    open_shared_file,
)
from paceline.plan.spec.values import ReadingMode
from paceline.plan.trials.sample_order import GlobalStep, SampleOrder, SampleRandom

__all__ = ["Batch", "Feed", "FeedOptions", "NodeShare", "SoloNode", "open_feed"]


_POLL_S = 0.2  # interval at which a blocked thread checks whether it should end
_END_S = 30.0
_READY_S = 600.0
_STUCK = "is the data set's disk or network storage stuck?"
_KEPT_READY = 2  # batches


Augment = Callable[["NDArray[Any]", SampleRandom], "NDArray[Any]"]


def is_image(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Return whether a sample is an image: uint8 of shape (height, width, 3)."""
    return dtype == np.uint8 and len(shape) == 3 and shape[-1] == 3


def mirror_at_random(image: NDArray[Any], random: SampleRandom) -> NDArray[Any]:
    """Mirror half of the images left to right."""
    return image[:, ::-1] if random.coin else image


@dataclass(frozen=True, slots=True)
class Batch:
    """A rank's part of a global step: n samples, 0 if the last batch has fewer than ranks."""

    step: int
    epoch: int
    sample_ids: NDArray[np.int64]  # shape (n,)
    inputs: NDArray[Any] | None  # shape (n, ...), augmented; None in later pipeline stages
    targets: NDArray[Any]  # shape (n, ...)


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """Rank, and preparation of the batches.

    with_inputs: False for pipeline stages after the first, whose batches have only sample ids and
    targets. augment, augment_target: random transforms of an input and of a target; None leaves
    them unchanged.
    """

    rank: int
    world_size: int
    decode_threads: int = 1
    with_inputs: bool = True
    augment: Augment | None = None
    augment_target: Augment | None = None


def augment(
    inputs: NDArray[Any] | None,
    targets: NDArray[Any],
    options: FeedOptions,
    seed: int,
    epoch: int,
    sample_ids: NDArray[np.int64],
) -> None:
    """Replace each input and target by its random transform, in place."""
    pairs = ((inputs, options.augment), (targets, options.augment_target))
    for values, transform in pairs:
        if values is None or transform is None:
            continue
        for row, sample_id in enumerate(sample_ids.tolist()):
            given = values[row]
            changed = transform(given, SampleRandom(seed, epoch, sample_id))
            if changed is not given:
                values[row] = changed.copy()


class Feed:
    """A rank's batches, one per global step, in order, prepared by a thread.

    An exception of the thread is raised where the batches are taken. The thread ends with `close`
    at the latest after the batch that it prepares, and it is a daemon, so an abandoned feed does
    not keep the process alive. A feed can be iterated once, and is a context manager.
    """

    def __init__(self, make: Callable[[threading.Event], Iterator[Batch]]) -> None:
        """Start the thread: make(stopped) yields the batches, a few of which are kept ready.

        `make` should return soon after `stopped` is set.
        """
        self._make = make
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue(_KEPT_READY)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-feed", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        while (item := self._take()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and wait for it. Raises TimedOut if it does not end within 30 s."""
        self._stopped.set()
        while not self._ready.empty():  # a thread that waits for room then continues at once
            with suppress(queue.Empty):
                self._ready.get_nowait()
        self._thread.join(_END_S)
        if self._thread.is_alive():
            raise TimedOut(f"the reading thread did not end within {_END_S:.0f} s; {_STUCK}")

    def _take(self) -> Batch | BaseException | None:
        waited_s = 0.0
        while not self._stopped.is_set():
            try:
                return self._ready.get(timeout=_POLL_S)
            except queue.Empty:
                waited_s += _POLL_S
                if waited_s > _READY_S:
                    raise TimedOut(
                        f"no batch was ready within {_READY_S:.0f} s; {_STUCK}"
                    ) from None
        return None

    def _run(self) -> None:
        last: BaseException | None = None
        try:
            for batch in self._make(self._stopped):
                if not self._put(batch):
                    return
        except BaseException as error:  # noqa: BLE001  (raised again in the consumer)
            last = error
        self._put(last)

    def _put(self, item: Batch | BaseException | None) -> bool:
        """Wait for room; return False if the consumer has closed the feed."""
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False


# Interface of what feeds read samples from: Parquet files, or a map-style data set of the task

Columns = tuple["NDArray[Any]", ...]


@dataclass(frozen=True, slots=True)
class Values:
    """Shape and type of a decoded input or target of one sample."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Size of one value in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Rows:
    """The stored rows of a row group, in storage order. Values may still be encoded."""

    first_sample_id: int
    count: int
    columns: Columns  # each of shape (count, ...)


class Source(Protocol):
    """The samples of a training in row groups, which are read in any order and decoded later."""

    @property
    def inputs(self) -> Values: ...

    @property
    def targets(self) -> Values: ...

    @property
    def row_group_rows(self) -> Sequence[int]: ...

    def read(self, groups: Sequence[int], *, with_inputs: bool) -> Iterator[Rows]:
        """Yield these row groups in that order, one in memory at a time. Raises DataError."""

    def decode(
        self,
        sample_ids: NDArray[np.int64],
        columns: Columns,
        inputs: NDArray[Any] | None,
        targets: NDArray[Any],
        pool: Executor,
    ) -> None:
        """Write the values of some stored rows to `inputs` and `targets`.

        inputs: None for rows that were read without inputs. pool: executes the decoding of single
        samples. Raises DataError.
        """


# --- the feed of a rank: the samples of the sample order, in either mode -------------------------
#
# `memory`: the samples that the training uses are decoded once per node and kept. `stream`: memory
# is bounded; samples are read and decoded while the training runs. A rank keeps its samples of one
# shuffle window still encoded, and reads those of the next window meanwhile.

_ATTACH_S = 120.0
_ALIGN_BYTES = 64


def open_feed(
    source: Source,
    order: SampleOrder,
    options: FeedOptions,
    *,
    mode: ReadingMode,
    share_of_node: NodeShare | None = None,
    timeout_s: float = 1800.0,
) -> Feed:
    """Return the batches of a rank, one for each step of `order`.

    `memory` decodes every sample that the training uses before it returns, once per node, and
    first checks that they fit. `stream` starts at once and keeps two shuffle windows of samples as
    they are stored; so does `cold`. All modes give the same samples and the same values.
    share_of_node: the ranks that share the decoded samples. timeout_s: how long ranks wait for
    each other to decode.
    Raises UsageError for values that cannot work, EnvironmentLacks if the memory is too small,
    DataError (also while iterating) if a file is damaged or differs from the manifest.
    """
    if tuple(order.row_group_rows) != tuple(source.row_group_rows):
        raise UsageError(
            "the sample order has other row groups than this data set; make it from the data set's "
            "row_group_rows"
        )
    rank, world_size = options.rank, options.world_size
    if not 0 <= rank < world_size:
        raise UsageError(f"rank: expected 0..{world_size - 1}, got {rank} of {world_size}")
    if mode == "memory":
        return MemoryFeed(source, order, options, share_of_node or SoloNode(), timeout_s)
    return StreamFeed(source, order, options)


class MemoryFeed(Feed):
    """Batches from one buffer of decoded samples, shared by the ranks of the node.

    Opening it decodes: the node's ranks divide the row groups among themselves, and wait for each
    other for at most `timeout_s`. A rank alone on its node keeps only its own samples.
    """

    def __init__(
        self,
        source: Source,
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
        targets_at = -(-samples * source.inputs.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        size = max(1, targets_at + samples * source.targets.nbytes)
        memory = _memory_for_samples(share, size, _ATTACH_S)
        self._inputs = _array(memory, source.inputs, samples, 0)
        self._targets = _array(memory, source.targets, samples, targets_at)
        groups = order.row_groups_of(self._used)
        own = groups[share.local_rank :: share.ranks_on_node] if memory.shared else groups
        self._fill(source, own)
        if memory.shared:
            share.barrier(timeout_s)
        super().__init__(self._batches)

    def close(self) -> None:
        """End the thread and release the memory. Raises TimedOut if the thread hangs."""
        super().close()
        self._inputs, self._targets = self._inputs[:0].copy(), self._targets[:0].copy()

    def _fill(self, source: Source, groups: Sequence[int]) -> None:
        with ThreadPoolExecutor(self._options.decode_threads, "paceline-decode") as pool:
            for rows in source.read(groups, with_inputs=True):
                first = rows.first_sample_id
                low, high = np.searchsorted(self._used, (first, first + rows.count))
                ids = self._used[low:high]
                source.decode(
                    ids,
                    tuple(column[ids - first] for column in rows.columns),
                    self._inputs[low:high],
                    self._targets[low:high],
                    pool,
                )

    def _batches(self, stopped: threading.Event) -> Iterator[Batch]:
        for number in range(self._order.first_step, self._order.steps):
            if stopped.is_set():
                return
            step = self._order.step(number)
            ids = step.share(self._options.rank, self._options.world_size)
            slots = np.searchsorted(self._used, ids)
            inputs = self._inputs[slots] if self._options.with_inputs else None
            targets = self._targets[slots]
            augment(inputs, targets, self._options, self._order.seed, step.epoch, ids)
            yield Batch(step.step, step.epoch, ids, inputs, targets)


@dataclass(frozen=True, slots=True)
class _SampleMemory:
    """Memory of `size` bytes, zero at first."""

    buffer: mmap.mmap | memoryview
    shared: bool  # all ranks of the node see the same bytes; otherwise each rank has its own


def _memory_for_samples(share: NodeShare, size: int, timeout_s: float) -> _SampleMemory:
    """Return memory that all ranks of the node share, or private memory if any rank cannot.

    size: in bytes. Raises EnvironmentLacks if less memory is free, TimedOut if the ranks of the
    node do not answer.
    """
    advice = 'use reading = "stream", a smaller image size or fewer steps'
    own = lack_of_memory(size, "the decoded samples", advice) or ""
    refusal = of_first(share, own, timeout_s, "refusal")
    if refusal:
        raise EnvironmentLacks(refusal)
    file = None if share.ranks_on_node == 1 else open_shared_file(share, timeout_s)
    if file is None:
        if own:
            raise EnvironmentLacks(own)
        return _SampleMemory(mmap.mmap(-1, size), shared=False)
    memory = file.map(size)
    file.close()
    return _SampleMemory(memory, shared=True)


def _array(memory: _SampleMemory, values: Values, samples: int, offset: int) -> NDArray[Any]:
    shape = (samples, *values.shape)
    return np.ndarray(shape, values.dtype, memory.buffer, offset)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Samples of a rank in order of training, still encoded."""

    ids: NDArray[np.int64]
    columns: Columns

    def take(self, count: int) -> tuple[_Stored, _Stored]:
        """Return the first `count` samples, and the others."""
        low = _Stored(self.ids[:count], tuple(c[:count] for c in self.columns))
        return low, _Stored(self.ids[count:], tuple(c[count:] for c in self.columns))

    def followed_by(self, later: _Stored) -> _Stored:
        """Return the samples of both."""
        if not len(self.ids):
            return later
        pairs = zip(self.columns, later.columns, strict=True)
        return _Stored(
            np.concatenate([self.ids, later.ids]), tuple(np.concatenate(pair) for pair in pairs)
        )


class StreamFeed(Feed):
    """Batches decoded when they are needed; a rank decodes its own samples only."""

    def __init__(self, source: Source, order: SampleOrder, options: FeedOptions) -> None:
        self._source = source
        self._order, self._options = order, options
        super().__init__(self._batches)

    def _batches(self, stopped: threading.Event) -> Iterator[Batch]:
        with (
            ThreadPoolExecutor(1, "paceline-read") as reader,
            ThreadPoolExecutor(self._options.decode_threads, "paceline-decode") as decoders,
        ):
            loaded = _Stored(np.empty(0, np.int64), ())
            windows = self._windows(reader, stopped)
            for number in range(self._order.first_step, self._order.steps):
                if stopped.is_set():
                    return
                step = self._order.step(number)
                ids = step.share(self._options.rank, self._options.world_size)
                while len(loaded.ids) < len(ids):
                    loaded = loaded.followed_by(next(windows))
                samples, loaded = loaded.take(len(ids))
                assert np.array_equal(samples.ids, ids), "windows are in order of training"
                yield self._batch(step, samples, decoders)

    def _batch(self, step: GlobalStep, samples: _Stored, decoders: ThreadPoolExecutor) -> Batch:
        count, source = len(samples.ids), self._source
        targets = _empty(source.targets, count)
        inputs = _empty(source.inputs, count) if self._options.with_inputs else None
        if count:
            source.decode(samples.ids, samples.columns, inputs, targets, decoders)
        augment(inputs, targets, self._options, self._order.seed, step.epoch, samples.ids)
        return Batch(step.step, step.epoch, samples.ids, inputs, targets)

    def _windows(self, reader: ThreadPoolExecutor, stopped: threading.Event) -> Iterator[_Stored]:
        """Yield this rank's samples by window; the next window is read while one is used."""
        upcoming: Future[_Stored] | None = None
        for own in self._samples_by_window():
            current, upcoming = upcoming, reader.submit(self._load, own, stopped)
            if current is not None:
                yield current.result()
            if stopped.is_set():
                return
        if upcoming is not None:
            yield upcoming.result()

    def _samples_by_window(self) -> Iterator[NDArray[np.int64]]:
        """Yield this rank's samples of each window that the training reaches, in order of training,
        unless there are none."""
        order = self._order
        per_epoch = order.steps_per_epoch
        for epoch in range(order.first_step // per_epoch, -(-order.steps // per_epoch)):
            first = max(0, order.first_step - epoch * per_epoch)
            steps = range(first, min(per_epoch, order.steps - epoch * per_epoch))
            start = 0
            for window in order.windows(epoch):
                own = window.sample_ids[self._is_own(start, len(window.sample_ids), steps)]
                if len(own):
                    yield own
                start += len(window.sample_ids)

    def _is_own(self, start: int, count: int, steps: range) -> NDArray[np.bool_]:
        """Return which of `count` positions from `start` in an epoch's order this rank gets in
        those steps of the epoch."""
        batch, samples = self._order.global_batch, self._order.samples
        is_own = np.zeros(count, dtype=bool)
        last = min(steps.stop, -(-(start + count) // batch))
        for number in range(max(steps.start, start // batch), last):
            first = number * batch
            size = min(batch, samples - first)
            low, high = share_bounds(size, self._options.rank, self._options.world_size)
            is_own[max(0, first + low - start) : max(0, first + high - start)] = True
        return is_own

    def _load(self, own: NDArray[np.int64], stopped: threading.Event) -> _Stored:
        """Read a window's row groups and keep own samples; stop early if the feed is closed."""
        columns: Columns | None = None
        groups = self._order.row_groups_of(own)
        for rows in self._source.read(groups, with_inputs=self._options.with_inputs):
            if stopped.is_set():
                break
            if columns is None:
                columns = tuple(np.empty((len(own), *c.shape[1:]), c.dtype) for c in rows.columns)
            first = rows.first_sample_id
            places = np.flatnonzero((own >= first) & (own < first + rows.count))
            for column, stored in zip(columns, rows.columns, strict=True):
                column[places] = stored[own[places] - first]
        return _Stored(own, columns or ())


def _empty(values: Values, samples: int) -> NDArray[Any]:
    return np.empty((samples, *values.shape), values.dtype)
