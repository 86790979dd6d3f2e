"""Dropout whose masks belong to samples instead of ranks.

nn.Dropout draws from a generator of the process, so two ranks with half a batch each drop other
units than one rank with the whole batch. Here a sample's mask is a function of (seed, epoch,
sample, layer), so a training with dropout is equivalent under every launcher, strategy and world
size.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.base.errors import UsageError
from paceline.base.torch_internals import DropoutLayer
from paceline.plan.trials.sample_order import sample_key

# plan.sample_order uses streams 1 to 4; layer i uses stream _FIRST_STREAM + i.
_FIRST_STREAM = 100
_FIRST_REPLACED = 10_000  # number of the first layer that replaces an nn.Dropout
_BITS = 16  # random bits per unit: probabilities are multiples of 2**-16
_UNITS_PER_WORD = 64 // _BITS
_GOLDEN = 0x9E3779B97F4A7C15


class SampleDropout(nn.Module):
    """Zero each unit with probability `p` and scale the others by 1 / (1 - p), as nn.Dropout does.

    layer: number of this layer in its model, so that layers drop independently. During training
    `set_sample_keys` must announce the samples before each forward pass. Each replica has its own
    keys. There are no parameters and no buffers.
    """

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"p: expected 0 <= p < 1, got {p}")
        self.p = p
        self.layer = layer
        self._keys: NDArray[np.uint64] | None = None

    def set_keys(self, seed: int, epoch: int, sample_ids: Iterable[int]) -> None:
        """Set the samples of the next forward pass, in order."""
        stream = _FIRST_STREAM + self.layer
        self._keys = np.array(
            [sample_key(seed, epoch, int(i), stream) for i in sample_ids], dtype=np.uint64
        )

    def forward(self, units: Tensor) -> Tensor:
        """Apply dropout to `units` of shape (samples, ...), in the order of the keys."""
        if not self.training or self.p == 0:
            return units
        if self._keys is None or len(self._keys) != len(units):
            known = "none" if self._keys is None else str(len(self._keys))
            raise ValueError(
                f"SampleDropout: got {len(units)} samples, but keys of {known}; "
                "call set_sample_keys before each forward pass"
            )
        keep = torch.from_numpy(keep_mask(self._keys, units[0].numel(), self.p))
        if not (units.is_cpu or units.is_meta):
            keep = keep.pin_memory()  # its copy does not let the program wait
        scale = keep.to(units.device, non_blocking=True).to(units.dtype).mul_(1 / (1 - self.p))
        return units * scale.view(units.shape)


def use_sample_dropout(model: nn.Module, *, enabled: bool) -> None:
    """Replace every nn.Dropout by a SampleDropout in place; without `enabled` it does nothing.

    Raises UsageError naming a layer whose masks cannot belong to samples.
    """
    # A layer with several names is replaced under each of them.
    for number, (path, module) in enumerate(list(model.named_modules(remove_duplicate=False))):
        if type(module) is nn.Dropout:
            parent, _, name = path.rpartition(".")
            replacement = SampleDropout(module.p if enabled else 0.0, _FIRST_REPLACED + number)
            setattr(model.get_submodule(parent), name, replacement)
        elif _has_own_masks(module):
            raise UsageError(
                f"layer {path} ({type(module).__name__}): its dropout draws from a generator of "
                "the process, so no two layouts train alike; use nn.Dropout, or dropout=0 for it"
            )


def _has_own_masks(module: nn.Module) -> bool:
    if isinstance(module, DropoutLayer):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return bool(module.dropout > 0)
    return isinstance(module, nn.RReLU)


def set_sample_keys(model: nn.Module, seed: int, epoch: int, sample_ids: Iterable[int]) -> None:
    """Set the samples of the next forward pass, in order, for every SampleDropout of `model`."""
    ids = list(sample_ids)
    for module in model.modules():
        if isinstance(module, SampleDropout) and module.p > 0:
            module.set_keys(seed, epoch, ids)


def keep_mask(keys: NDArray[np.uint64], units: int, p: float) -> NDArray[np.bool_]:
    """Return which units are kept, shape (len(keys), units).

    SplitMix64 (Steele, Lea, Flood: OOPSLA 2014) as a counter-based generator: word j of a sample is
    the finaliser of key + (j + 1) * golden ratio. It has no state and gives the same bits on every
    machine. One pass over the whole batch costs as little as nn.Dropout.
    """
    words = -(-units // _UNITS_PER_WORD)
    steps = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    state = keys[:, None] + steps[None, :]  # wraps around as intended
    scratch = np.empty_like(state)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(state, np.uint64(shift), out=scratch)
        state ^= scratch
        state *= np.uint64(factor)
    np.right_shift(state, np.uint64(31), out=scratch)
    state ^= scratch
    # "<u8" gives the same order of the 16-bit parts on machines of either endianness.
    parts = state.astype("<u8", copy=False).view("<u2")[:, :units]
    keep: NDArray[np.bool_] = parts >= np.uint16(round(p * 2**_BITS))
    return keep
