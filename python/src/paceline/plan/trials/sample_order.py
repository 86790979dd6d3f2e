"""The samples of every global step, the same under every launcher, strategy and number of ranks.

The order of an epoch depends on (seed, epoch, sizes of the row groups) alone. It has two levels, as
in WebDataset and mosaicml-streaming: row groups are permuted and divided into windows of
`window_row_groups`, then the samples of each window are permuted. So a reader that streams row
groups needs memory for one window, and a reader that keeps all samples has the same order.

Samples may be held out for evaluation. They depend on (split seed, number of samples) alone, and no
step of the training has them.

The last batch of an epoch may be smaller. Its samples are divided as evenly as possible, so some
ranks may have none, and the loss is weighted by the real number of samples. No sample is dropped or
seen twice in an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.base.errors import UsageError
from paceline.collectives.message_schedules import share_bounds
from paceline.plan.spec.values import training_steps
from paceline.plan.trials.trial import Training

# Independent streams of random numbers.
_ROW_GROUP_STREAM, _WINDOW_STREAM, _COIN_STREAM, _AUGMENT_STREAM, _HELD_OUT_STREAM = 1, 2, 3, 4, 5


# Those of two readers (the training, and the feed ahead of it) and of a batch that spans some.
_KEPT_WINDOWS = 8


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive row groups of an epoch, whose samples are shuffled together."""

    row_groups: tuple[int, ...]
    sample_ids: NDArray[np.int64]  # shape (samples of these row groups,), in order of training


@dataclass(frozen=True, slots=True)
class GlobalStep:
    """The samples of all ranks in one global step, in order."""

    step: int
    epoch: int
    sample_ids: NDArray[np.int64]  # shape (global batch or fewer,)

    def share(self, rank: int, world_size: int) -> NDArray[np.int64]:
        """Return the consecutive samples of `rank`; all ranks have the same number, or one more."""
        low, high = share_bounds(len(self.sample_ids), rank, world_size)
        return self.sample_ids[low:high]


@dataclass(frozen=True, slots=True)
class SampleRandom:
    """Random numbers of one sample in one epoch: the same on every rank."""

    _seed: int
    _epoch: int
    _sample_id: int

    @property
    def coin(self) -> bool:
        """True for half of the samples; the same at each use."""
        return bool(_hash64(self._seed, _COIN_STREAM, self._epoch, self._sample_id) & 1)

    @property
    def seed(self) -> int:
        """A 63-bit seed, for example for torch.Generator."""
        return sample_key(self._seed, self._epoch, self._sample_id, _AUGMENT_STREAM)

    def numpy(self) -> np.random.Generator:
        """Return a new generator with that seed."""
        return np.random.default_rng(self.seed)


def sample_key(seed: int, epoch: int, sample_id: int, stream: int) -> int:
    """Return a seed of 63 bits for random numbers of a sample in an epoch, on any rank."""
    return _hash64(seed, stream, epoch, sample_id) >> 1


def _hash64(*words: int) -> int:
    """Hash `words` with SplitMix64's finaliser (Steele, Lea, Flood: OOPSLA 2014)."""
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
class SampleOrder:
    """The samples of every step of a training.

    row_group_rows: number of samples in each row group; sample ids number them consecutively.
    epochs, max_steps: the training ends at the first of both limits; None: no limit.
    held_out_samples: samples that are kept for evaluation, drawn with split_seed.
    part: the samples that this order has: those to train on, or without them the held-out ones
    or the whole data set, which have one epoch in order of id.
    first_step: with which feeds begin, in a training that continues.
    Raises UsageError if a value is not allowed.
    """

    row_group_rows: Sequence[int]
    seed: int
    global_batch: int
    epochs: int
    max_steps: int | None = None
    window_row_groups: int = 8
    held_out_samples: int = 0
    split_seed: int = 0
    part: Literal["training", "held_out", "whole"] = "training"
    first_step: int = 0

    def __post_init__(self) -> None:
        if not self.row_group_rows or min(self.row_group_rows) < 1:
            raise UsageError("row_group_rows: expected row groups of at least one sample each")
        for name in ("global_batch", "epochs", "window_row_groups"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.max_steps is not None and self.max_steps < 1:
            raise UsageError(f"max_steps: expected at least 1, got {self.max_steps}")
        if not 0 <= self.held_out_samples < sum(self.row_group_rows):
            raise UsageError(
                "held_out_samples: expected fewer than the data set's "
                f"{sum(self.row_group_rows)} samples, got {self.held_out_samples}"
            )

    def held_out(self) -> SampleOrder:
        """Return the order of the samples that are held out, in batches of the same size."""
        return replace(self, part="held_out", epochs=1, max_steps=None, first_step=0)

    def of_whole(self, row_group_rows: Sequence[int]) -> SampleOrder:
        """Return the order of all samples of another data set, in batches of the same size."""
        return SampleOrder(row_group_rows, self.seed, self.global_batch, epochs=1, part="whole")

    def since(self, step: int) -> SampleOrder:
        """Return the same order for a training that continues with `step`."""
        return replace(self, first_step=step)

    @cached_property
    def _is_used(self) -> NDArray[np.bool_]:
        """Mask of the samples of the data set that this order has."""
        total = int(self._first_ids[-1])
        if self.part == "whole":
            return np.ones(total, dtype=bool)
        is_held_out = np.zeros(total, dtype=bool)
        generator = np.random.Generator(np.random.PCG64([self.split_seed, _HELD_OUT_STREAM]))
        is_held_out[generator.choice(total, self.held_out_samples, replace=False)] = True
        return is_held_out if self.part == "held_out" else ~is_held_out

    @cached_property
    def _first_ids(self) -> NDArray[np.int64]:
        """The id of the first sample of each row group, and the number of samples."""
        return np.cumsum([0, *self.row_group_rows])

    @cached_property
    def samples(self) -> int:
        """The number of samples in an epoch."""
        return int(self._is_used.sum())

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch)

    @property
    def steps(self) -> int:
        """The number of global steps of the training."""
        return training_steps(self.samples, self.global_batch, self.epochs, self.max_steps)

    def row_groups_of(self, sample_ids: Sequence[int] | NDArray[np.int64]) -> list[int]:
        """Return the ascending indexes of the row groups that contain these samples."""
        places = np.searchsorted(self._first_ids, sample_ids, side="right")
        groups: list[int] = np.unique(places - 1).tolist()
        return groups

    def windows(self, epoch: int) -> Iterator[Window]:
        """Yield the windows of an epoch in order of training."""
        for number in range(len(self._window_bounds(epoch)) - 1):
            yield self._window(epoch, number)

    def step(self, step: int) -> GlobalStep:
        """Return global step `step`, counted from 0."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.global_batch
        end = min(start + self.global_batch, self.samples)
        bounds = self._window_bounds(epoch)
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        last = int(np.searchsorted(bounds, end, side="left"))
        parts = [
            self._window(epoch, number).sample_ids[max(0, start - low) : end - low]
            for number, low in zip(range(first, last), bounds[first:].tolist(), strict=False)
        ]
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return GlobalStep(step=step, epoch=epoch, sample_ids=ids)

    @cached_property
    def _window(self) -> Callable[[int, int], Window]:
        """Function of epoch and number that returns a window.

        It keeps few windows, not whole epochs, whose samples may be many. Feeds are about two
        windows ahead of the training.
        """
        return lru_cache(maxsize=_KEPT_WINDOWS)(self._new_window)

    def _new_window(self, epoch: int, number: int) -> Window:
        start = number * self.window_row_groups
        groups = self._row_group_order(epoch)[start : start + self.window_row_groups].tolist()
        ids = np.concatenate(
            [np.arange(self._first_ids[g], self._first_ids[g + 1]) for g in groups]
        )
        ids = ids[self._is_used[ids]]
        if self.part == "training":
            self._generator(_WINDOW_STREAM, epoch, number).shuffle(ids)
        return Window(row_groups=tuple(groups), sample_ids=ids)

    @cached_property
    def _window_bounds(self) -> Callable[[int], NDArray[np.int64]]:
        """Function of the epoch that returns where its windows begin, and the number of samples."""
        return lru_cache(maxsize=2)(self._new_window_bounds)

    def _new_window_bounds(self, epoch: int) -> NDArray[np.int64]:
        used = self._used_in_row_group[self._row_group_order(epoch)]
        starts = range(0, len(used), self.window_row_groups)
        return np.cumsum([0, *np.add.reduceat(used, starts).tolist()])

    @cached_property
    def _used_in_row_group(self) -> NDArray[np.int64]:
        parts = np.split(self._is_used, self._first_ids[1:-1])
        return np.array([np.count_nonzero(part) for part in parts], dtype=np.int64)

    def _row_group_order(self, epoch: int) -> NDArray[np.int64]:
        groups = len(self.row_group_rows)
        if self.part != "training":
            return np.arange(groups)
        return self._generator(_ROW_GROUP_STREAM, epoch, 0).permutation(groups)

    def used_sample_ids(self, rank: int = 0, world_size: int = 1) -> NDArray[np.int64]:
        """Return the ascending ids of the samples that `rank` uses in any step, at least one.

        At least one, because a feed cannot allocate memory of zero bytes.
        """
        used = np.zeros(len(self._is_used), dtype=bool)
        for step in range(self.first_step, self.steps):
            used[self.step(step).share(rank, world_size)] = True
            if step % self.steps_per_epoch == 0 and used[self._is_used].all():
                break  # later epochs add nothing
        used[0] |= not used.any()
        return np.flatnonzero(used)

    def _generator(self, stream: int, epoch: int, number: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self.seed, stream, epoch, number]))


def sample_order_of(training: Training, row_group_rows: Sequence[int]) -> SampleOrder:
    """Return the order of the samples of `training`, on a data set with these row groups."""
    evaluation = training.evaluation
    return SampleOrder(
        row_group_rows=row_group_rows,
        seed=training.seed,
        global_batch=training.global_batch,
        epochs=training.epochs,
        max_steps=training.max_steps,
        held_out_samples=0 if evaluation is None else evaluation.held_out_samples,
        split_seed=0 if evaluation is None else evaluation.split_seed,
    )
