"""Codecs: gradients as 16-bit and 8-bit numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing import Literal

BLOCK = 256  # elements that share a scale, which takes 4 bytes
_LEVELS = 127.0
_SCALE_BYTES = 4


class Half:
    """Rounding to bfloat16 (8 bits of mantissa, range of float32) or float16 (11 bits).

    float16 clamps larger values to its maximum, 65504, so that no infinity reaches the weights;
    values below 6e-8 become 0. NaN stays NaN.
    """

    def __init__(self, name: Literal["bf16", "fp16"]) -> None:
        self.name: str = name
        self.block = 1
        self.feeds_back = False
        self._type = torch.bfloat16 if name == "bf16" else torch.float16

    def encode(self, parts: Tensor) -> Tensor:
        if self._type == torch.float16:
            largest = torch.finfo(self._type).max
            parts = parts.clamp(-largest, largest)
        return parts.to(self._type).view(torch.uint8)

    def decode(self, encoded: Tensor) -> Tensor:
        return encoded.view(self._type).to(torch.float32)

    def describe(self) -> dict[str, Any]:
        return {}


class Blockwise:
    """Integers from -127 to 127 times a scale per block: the largest magnitude over 127, rounded to
    nearest.

    Seide et al. and Dettmers (8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016)
    quantise gradients so. Blocks keep one large value from reducing the precision of all others.
    """

    def __init__(self, block: int = BLOCK) -> None:
        self.name = "int8"
        self.block = block
        self.feeds_back = True

    def encode(self, parts: Tensor) -> Tensor:
        """Return for each part the scales of its blocks, then their integers."""
        blocks = parts.view(len(parts), -1, self.block)
        scales = blocks.abs().amax(dim=2, keepdim=True).div_(_LEVELS)
        smallest = torch.finfo(torch.float32).tiny
        numbers = blocks.div(scales.clamp_min(smallest)).round_().to(torch.int8)
        return torch.cat(
            [
                scales.view(len(parts), -1).view(torch.uint8),
                numbers.view(len(parts), -1).view(torch.uint8),
            ],
            dim=1,
        )

    def decode(self, encoded: Tensor) -> Tensor:
        blocks = encoded.shape[1] // (self.block + _SCALE_BYTES)
        scales, numbers = torch.split(encoded, [_SCALE_BYTES * blocks, self.block * blocks], dim=1)
        shaped = numbers.view(torch.int8).view(len(encoded), blocks, self.block)
        factors = scales.contiguous().view(torch.float32).view(len(encoded), blocks, 1)
        decoded: Tensor = shaped * factors
        return decoded.view(len(encoded), -1)

    def describe(self) -> dict[str, Any]:
        return {"block": self.block}
