"""Which samples every global step sees: the same under every launcher, strategy and world size.

An epoch's order is a function of (seed, epoch, row-group sizes) alone. Row groups are permuted,
then taken `window_row_groups` at a time, and the samples of one window are permuted among
themselves: so a reader that streams row groups needs no more than a window in memory, and a
reader that holds everything sees the very same order. (Two-level shuffling as in WebDataset and
mosaicml-streaming; the shuffle radius is the window.)

The last batch of an epoch may be smaller. It is kept: its samples are shared out as evenly as
they go, ranks may then hold none, and the loss is weighted by the true number of samples, so the
step is the same as on one process. Nothing is dropped and nothing is seen twice in an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from paceline.plan.trial import Training

# Streams of random numbers that must not touch each other.
_ROW_GROUP_STREAM, _WINDOW_STREAM, _FLIP_STREAM = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive row groups of an epoch's order whose samples are shuffled together."""

    row_groups: tuple[int, ...]
    sample_ids: NDArray[np.int64]  # shape (samples of these row groups,), in training order


@dataclass(frozen=True, slots=True)
class GlobalStep:
    """One global step: all ranks' samples, in order."""

    step: int
    epoch: int
    sample_ids: NDArray[np.int64]  # shape (global batch or fewer,)

    def share(self, rank: int, world_size: int) -> NDArray[np.int64]:
        """The contiguous part of the batch that `rank` trains on; sizes differ by at most one."""
        low, high = share_bounds(len(self.sample_ids), rank, world_size)
        return self.sample_ids[low:high]


def share_bounds(samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """Half-open bounds of `rank`'s part of `samples`; the first ranks take the remainder."""
    base, extra = divmod(samples, world_size)
    low = rank * base + min(rank, extra)
    return low, low + base + (1 if rank < extra else 0)


def flipped(seed: int, epoch: int, sample_id: int) -> bool:
    """Return whether a sample is mirrored in an epoch: half of them, on any rank."""
    return bool(_hash64(seed, _FLIP_STREAM, epoch, sample_id) & 1)


def sample_key(seed: int, epoch: int, sample_id: int, stream: int) -> int:
    """A 63-bit seed for random numbers that belong to a sample in an epoch, not to a rank."""
    return _hash64(seed, stream, epoch, sample_id) >> 1


def _hash64(*words: int) -> int:
    """SplitMix64's finaliser folded over `words` (Steele, Lea, Flood: OOPSLA 2014)."""
    mask = (1 << 64) - 1
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = (state + (word & mask) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & mask
        state ^= state >> 30
        state = (state * 0xBF58476D1CE4E5B9) & mask
        state ^= state >> 27
        state = (state * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state


@dataclass(frozen=True)
class Schedule:
    """The samples of every step of a training.

    row_group_rows: samples in each row group; sample ids count through them in order.
    epochs and max_steps: training ends at whichever comes first; max_steps None means no limit.
    Raises UsageError if a value cannot work.
    """

    row_group_rows: Sequence[int]
    seed: int
    global_batch: int
    epochs: int
    max_steps: int | None = None
    window_row_groups: int = 8
    _offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.row_group_rows or min(self.row_group_rows) < 1:
            raise UsageError("schedule: expected row groups of at least one sample each")
        for name in ("global_batch", "epochs", "window_row_groups"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.max_steps is not None and self.max_steps < 1:
            raise UsageError(f"max_steps: expected at least 1, got {self.max_steps}")
        offsets = np.concatenate([[0], np.cumsum(self.row_group_rows)])
        object.__setattr__(self, "_offsets", tuple(int(o) for o in offsets))

    @property
    def samples(self) -> int:
        return self._offsets[-1]

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch)

    @property
    def steps(self) -> int:
        """Number of global steps of the whole training."""
        whole = self.steps_per_epoch * self.epochs
        return whole if self.max_steps is None else min(whole, self.max_steps)

    def row_group_of(self, sample_id: int) -> int:
        """Index of the row group that holds `sample_id`."""
        return int(np.searchsorted(self._offsets, sample_id, side="right")) - 1

    def windows(self, epoch: int) -> Iterator[Window]:
        """The epoch's windows in training order."""
        order = self._generator(_ROW_GROUP_STREAM, epoch, 0).permutation(len(self.row_group_rows))
        for number, start in enumerate(range(0, len(order), self.window_row_groups)):
            groups = tuple(int(g) for g in order[start : start + self.window_row_groups])
            ids = np.concatenate(
                [np.arange(self._offsets[g], self._offsets[g + 1], dtype=np.int64) for g in groups]
            )
            self._generator(_WINDOW_STREAM, epoch, number).shuffle(ids)
            yield Window(row_groups=groups, sample_ids=ids)

    def epoch_order(self, epoch: int) -> NDArray[np.int64]:
        """All sample ids of an epoch in training order, shape (samples,)."""
        return self._epoch_orders(epoch)

    def step(self, step: int) -> GlobalStep:
        """Global step `step` (from 0)."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.global_batch
        ids = self._epoch_orders(epoch)[start : start + self.global_batch]
        return GlobalStep(step=step, epoch=epoch, sample_ids=ids)

    def used_sample_ids(self) -> NDArray[np.int64]:
        """Sorted ids of all samples that any step of the training sees."""
        if self.steps >= self.steps_per_epoch:
            return np.arange(self.samples, dtype=np.int64)
        return np.sort(self._epoch_orders(0)[: self.steps * self.global_batch])

    @cached_property
    def _epoch_orders(self) -> _EpochOrders:
        return _EpochOrders(self)

    def _generator(self, stream: int, epoch: int, number: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self.seed, stream, epoch, number]))


def schedule_of(training: Training, row_group_rows: Sequence[int]) -> Schedule:
    """The samples of every step of `training` on a data set with these row groups."""
    return Schedule(
        row_group_rows=row_group_rows,
        seed=training.seed,
        global_batch=training.global_batch,
        epochs=training.epochs,
        max_steps=training.max_steps,
    )


class _EpochOrders:
    """The last two epochs' orders, kept: prefetching straddles an epoch's end."""

    def __init__(self, schedule: Schedule) -> None:
        self._order = lru_cache(maxsize=2)(
            lambda epoch: np.concatenate([w.sample_ids for w in schedule.windows(epoch)])
        )

    def __call__(self, epoch: int) -> NDArray[np.int64]:
        return self._order(epoch)
