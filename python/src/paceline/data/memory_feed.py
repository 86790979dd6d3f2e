"""Mode `memory`: the samples that the training uses, decoded once per node and kept."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.data.batches import Batch, Feed, FeedOptions, augment
from paceline.node.memory import NodeMemory, NodeShare, memory_for_samples

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from paceline.data.source import Source, Values
    from paceline.plan.sample_order import SampleOrder

_ATTACH_S = 120.0
_ALIGN_BYTES = 64


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
        memory = memory_for_samples(share, size, _ATTACH_S)
        self._inputs = _array(memory, source.inputs, samples, 0)
        self._targets = _array(memory, source.targets, samples, targets_at)
        self._fill(source, self._row_groups_to_decode(share, memory))
        if memory.shared:
            share.barrier(timeout_s)
        super().__init__(self._batches, options.prefetch_batches)

    def close(self) -> None:
        """End the thread and release the memory. Raises TimedOut if the thread hangs."""
        super().close()
        self._inputs, self._targets = self._inputs[:0].copy(), self._targets[:0].copy()

    def _row_groups_to_decode(self, share: NodeShare, memory: NodeMemory) -> list[int]:
        """Return every k-th of the used row groups, or all if the memory is not shared."""
        used = self._order.row_groups_of(self._used)
        return used[share.local_rank :: share.ranks_on_node] if memory.shared else used

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


def _array(memory: NodeMemory, values: Values, samples: int, offset: int) -> NDArray[Any]:
    shape = (samples, *values.shape)
    return np.ndarray(shape, values.dtype, memory.buffer, offset)
