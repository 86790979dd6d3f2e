"""The reference training: torch alone, one process, one model, the whole batch in one pass.

Nothing here comes from the code that it judges. The order of the samples and the dropout masks are
computed from their documented definition (docs/reference/run-directory.md,
plan/trials/sample_order.py), in other code than the product's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROW_GROUP_STREAM, _WINDOW_STREAM, _FIRST_DROPOUT_STREAM = 1, 2, 100


@dataclass(frozen=True)
class Batch:
    """The samples of one global step with their inputs and targets."""

    epoch: int
    sample_ids: list[int]
    inputs: Tensor
    targets: Tensor


def epoch_order(
    row_group_rows: Sequence[int], seed: int, epoch: int, window_row_groups: int = 8
) -> list[int]:
    """Return the sample ids of an epoch: row groups permuted, then the samples of each window."""
    first_ids = [sum(row_group_rows[:group]) for group in range(len(row_group_rows))]
    groups = _generator(seed, _ROW_GROUP_STREAM, epoch, 0).permutation(len(row_group_rows))
    ids: list[int] = []
    for number in range(-(-len(groups) // window_row_groups)):
        window = groups[number * window_row_groups : (number + 1) * window_row_groups]
        inside = np.array(
            [first_ids[group] + row for group in window for row in range(row_group_rows[group])]
        )
        _generator(seed, _WINDOW_STREAM, epoch, number).shuffle(inside)
        ids += inside.tolist()
    return ids


def step_samples(
    row_group_rows: Sequence[int], seed: int, global_batch: int, step: int
) -> tuple[int, list[int]]:
    """Return the epoch of a global step and its sample ids; the last batch of an epoch is short."""
    steps_per_epoch = -(-sum(row_group_rows) // global_batch)
    epoch, within = divmod(step, steps_per_epoch)
    ids = epoch_order(row_group_rows, seed, epoch)
    return epoch, ids[within * global_batch : (within + 1) * global_batch]


def rank_share(sample_ids: list[int], rank: int, ranks: int) -> list[int]:
    """Return the samples of a rank: consecutive, the first ranks get one more of a remainder."""
    sizes = [len(sample_ids) // ranks + (r < len(sample_ids) % ranks) for r in range(ranks)]
    low = sum(sizes[:rank])
    return sample_ids[low : low + sizes[rank]]


def global_batches(
    row_group_rows: Sequence[int],
    seed: int,
    global_batch: int,
    steps: int,
    inputs: Tensor,
    targets: Tensor,
) -> Iterator[Batch]:
    """Yield the global batches of a training; `inputs` and `targets` by sample id."""
    for step in range(steps):
        epoch, ids = step_samples(row_group_rows, seed, global_batch, step)
        yield Batch(epoch, ids, inputs[ids], targets[ids])


def _generator(*words: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(list(words)))


def _finalise(state: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood: OOPSLA 2014)."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def sample_key(seed: int, epoch: int, sample_id: int, stream: int) -> int:
    """Return the key of a sample's random numbers, 63 bits."""
    state = _GOLDEN
    for word in (seed, stream, epoch, sample_id):
        state = _finalise((state + word * _GOLDEN + _GOLDEN) & _MASK)
    return state >> 1


def dropout_mask(key: int, units: int, p: float) -> NDArray[np.bool_]:
    """Return the kept units of a sample: 16 bits of a counter-based generator for each unit."""
    words = [(key + (j + 1) * _GOLDEN) & _MASK for j in range(-(-units // 4))]
    state = np.array(words, dtype=np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    state = state ^ (state >> np.uint64(31))
    bits = [(state >> np.uint64(16 * part)) & np.uint64(0xFFFF) for part in range(4)]
    kept: NDArray[np.bool_] = np.stack(bits, axis=1).reshape(-1)[:units] >= round(p * 65536)
    return kept


class _Masks:
    """Forward of a dropout layer with the masks of this module instead of the product's."""

    def __init__(self, p: float, layer: int, seed: int) -> None:
        self._p, self._stream, self._seed = p, _FIRST_DROPOUT_STREAM + layer, seed
        self.samples: tuple[int, list[int]] = (0, [])  # epoch and ids of the next batch

    def __call__(self, units: Tensor) -> Tensor:
        epoch, ids = self.samples
        keys = [sample_key(self._seed, epoch, i, self._stream) for i in ids]
        rows = np.stack([dropout_mask(key, units[0].numel(), self._p) for key in keys])
        keep = torch.from_numpy(rows).to(units.dtype).view(units.shape)
        return units * keep / (1 - self._p)


def _own_masks(model: nn.Module, seed: int) -> list[_Masks]:
    """Give the dropout layers of `model` the masks of this module; they have `p` and `layer`."""
    layers = [m for m in model.modules() if type(m).__name__ == "SampleDropout" and m.p > 0]
    masks = [_Masks(layer.p, layer.layer, seed) for layer in layers]
    for layer, mask in zip(layers, masks, strict=True):
        layer.forward = mask  # type: ignore[method-assign]
    return masks


def mean_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a batch."""
    return cross_entropy(outputs, targets)


def train_alone(
    model: nn.Module,
    batches: Iterable[Batch],
    optimizer: torch.optim.Optimizer,
    *,
    seed: int,
    loss: Callable[[Tensor, Tensor], Tensor] = mean_cross_entropy,
    precision: str = "fp32",
    clip_norm: float | None = None,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
    after_step: Callable[[int], None] = lambda _: None,
) -> list[dict[str, Tensor]]:
    """Train `model` in place; return the gradients of each step by parameter, before clipping.

    loss: mean loss of a batch from outputs and targets. after_step: called with the number of each
    finished step.
    """
    masks = _own_masks(model, seed)
    bf16 = torch.autocast("cpu", dtype=torch.bfloat16)
    gradients = []
    for number, batch in enumerate(batches):
        for mask in masks:
            mask.samples = (batch.epoch, batch.sample_ids)
        optimizer.zero_grad()
        with bf16 if precision == "bf16" else nullcontext():
            value = loss(model(batch.inputs), batch.targets)
        value.backward()
        named = [(name, p.grad) for name, p in model.named_parameters() if p.requires_grad]
        gradients.append({name: grad.clone() for name, grad in named if grad is not None})
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        after_step(number)
    return gradients
