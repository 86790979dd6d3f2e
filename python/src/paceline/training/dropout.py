"""Dropout whose masks belong to samples, not to ranks.

nn.Dropout draws from a generator of the process, so two ranks with half a batch each drop other
units than one rank with the whole. Here a sample's mask is a function of (seed, epoch, sample,
layer): the training is the same under every launcher, strategy and world size, dropout included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from paceline.plan.schedule import sample_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

# plan.schedule uses the streams 1 to 3; layer i here is stream _FIRST_STREAM + i.
_FIRST_STREAM = 100
_BITS = 16  # random bits a unit: probabilities are multiples of 2**-16
_UNITS_PER_WORD = 64 // _BITS
_GOLDEN = 0x9E3779B97F4A7C15


class SampleDropout(nn.Module):
    """Zero each unit with probability `p`, scale the others by 1 / (1 - p), as nn.Dropout does.

    layer: number of this layer in its model, so that layers drop independently.
    While training, `set_sample_keys` must say before each forward pass which samples come; each
    replica has keys of its own. There are no parameters and no buffers.
    """

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"p: expected 0 <= p < 1, got {p}")
        self.p = p
        self.layer = layer
        self._keys: NDArray[np.uint64] | None = None

    def set_keys(self, seed: int, epoch: int, sample_ids: Iterable[int]) -> None:
        """Say which samples the next forward pass gets, in order."""
        stream = _FIRST_STREAM + self.layer
        self._keys = np.array(
            [sample_key(seed, epoch, int(i), stream) for i in sample_ids], dtype=np.uint64
        )

    def forward(self, units: Tensor) -> Tensor:
        """`units`: shape (samples, ...), in the order of the keys."""
        if not self.training or self.p == 0:
            return units
        if self._keys is None or len(self._keys) != len(units):
            known = "none" if self._keys is None else str(len(self._keys))
            raise ValueError(
                f"SampleDropout: got {len(units)} samples, but keys of {known}; "
                "call set_sample_keys before each forward pass"
            )
        keep = torch.from_numpy(keep_mask(self._keys, units[0].numel(), self.p))
        scale = keep.to(device=units.device, dtype=units.dtype).mul_(1 / (1 - self.p))
        return units * scale.view(units.shape)

    def extra_repr(self) -> str:
        return f"p={self.p}, layer={self.layer}"


def set_sample_keys(model: nn.Module, seed: int, epoch: int, sample_ids: Iterable[int]) -> None:
    """Tell every SampleDropout of `model` which samples the next forward pass gets, in order."""
    ids = list(sample_ids)
    for module in model.modules():
        if isinstance(module, SampleDropout) and module.p > 0:
            module.set_keys(seed, epoch, ids)


def keep_mask(keys: NDArray[np.uint64], units: int, p: float) -> NDArray[np.bool_]:
    """Which units are kept, shape (len(keys), units).

    SplitMix64 (Steele, Lea, Flood: OOPSLA 2014) as a counter-based generator: word j of a sample
    is the finaliser of key + (j + 1) * golden ratio. It needs no state and gives the same bits on
    every machine, and one pass over the whole batch is as cheap as nn.Dropout.
    """
    words = -(-units // _UNITS_PER_WORD)
    steps = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    state = keys[:, None] + steps[None, :]  # wraps around, as it should
    scratch = np.empty_like(state)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(state, np.uint64(shift), out=scratch)
        state ^= scratch
        state *= np.uint64(factor)
    np.right_shift(state, np.uint64(31), out=scratch)
    state ^= scratch
    # "<u8": the same order of the 16-bit parts on machines of either endianness.
    parts = state.astype("<u8", copy=False).view("<u2")[:, :units]
    keep: NDArray[np.bool_] = parts >= np.uint16(round(p * 2**_BITS))
    return keep
