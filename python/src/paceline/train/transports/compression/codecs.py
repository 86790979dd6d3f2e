"""Codecs: gradients as 16-bit and 8-bit numbers, sent encoded and summed decoded.

    every rank encodes its n parts of the bucket and sends part k to rank k     (all-to-all)
    rank k decodes what it received and sums it in float32, in the order of the ranks
    rank k encodes the sum and sends it to all ranks                            (all-gather)
    every rank decodes the n sums

Each rank sends 2 (n - 1) / n times the encoded bucket, like a bandwidth-optimal all-reduce of it.
But the sum keeps the precision of float32, and no transport needs to add encoded numbers (Open MPI
sums 16-bit types as 32-bit ones, and sends those). All ranks decode the same bytes, so results are
bit-identical.

Between two ranks the volume is the same if each receives the other's whole bucket (all-gather) and
sums both itself in the order of the ranks. That needs one message less, and the sum is not encoded
again. So two ranks use this variant.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from paceline.measure.records.communication import CompressionResult
from paceline.plan.costs.link_cost import all_gather_bytes, exchange_bytes
from paceline.train.transports.compression.bucket import (
    Bucket,
    Numbers,
    Residuals,
    all_gather,
    all_to_all,
)

BLOCK = 256  # elements that share a scale, which takes 4 bytes
_LEVELS = 127.0
_SCALE_BYTES = 4


class Half:
    """Rounding to bfloat16 (8 bits of mantissa, range of float32) or float16 (11 bits).

    float16 clamps larger values to its maximum, 65504, so that no infinity reaches the weights;
    values below 3e-8 become 0. NaN stays NaN.
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

    def describe(self) -> CompressionResult:
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

    def describe(self) -> CompressionResult:
        return {"block": self.block}


# Encodes float32 numbers as fewer bytes; encoding twice gives the same bytes. `encode` takes parts
# of shape (m, elements), each by itself, and returns uint8 of shape (m, bytes); `decode` returns a
# new tensor of shape (m, elements). block: the number of elements of a part is a multiple of this.
# feeds_back: whether the error is added to the next step (error feedback).
Codec = Half | Blockwise


class CodecCompressor:
    """A compressor that uses a codec."""

    def __init__(self, codec: Codec, group: dist.ProcessGroup | None = None) -> None:
        self.name = codec.name
        self._codec = codec
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._in_parts = self._ranks > 2
        self._residuals = Residuals() if codec.feeds_back else None

    def sum(self, bucket: Bucket) -> float:
        flat = bucket.buffer()
        residual = None if self._residuals is None else self._residuals.of(bucket)
        if residual is not None:
            flat.add_(residual)
        return (self._sum_parts if self._in_parts else self._sum_all)(flat, residual)

    def _sum_all(self, flat: Tensor, residual: Tensor | None) -> float:
        encoded = self._codec.encode(self._parts(flat, 1))
        if residual is not None:
            torch.sub(flat, self._codec.decode(encoded).view(-1)[: flat.numel()], out=residual)
        gathered = all_gather(encoded.view(-1), self._group)
        first, *others = self._codec.decode(gathered)
        for other in others:
            first += other
        flat.copy_(first[: flat.numel()])
        return all_gather_bytes(encoded.nbytes, self._ranks)

    def _sum_parts(self, flat: Tensor, residual: Tensor | None) -> float:
        encoded = self._codec.encode(self._parts(flat, self._ranks))
        received = all_to_all(encoded, self._group)
        total = self._codec.decode(received).sum(dim=0, keepdim=True)
        own = self._codec.encode(total)
        if residual is not None:
            self._keep(residual, flat, encoded, total - self._codec.decode(own))
        gathered = all_gather(own.view(-1), self._group)
        flat.copy_(self._codec.decode(gathered).view(-1)[: flat.numel()])
        sent = exchange_bytes(encoded.nbytes, self._ranks)
        return sent + all_gather_bytes(own.nbytes, self._ranks)

    def describe(self) -> CompressionResult:
        return {**self._codec.describe(), "error_feedback": self._codec.feeds_back}

    def _parts(self, flat: Tensor, parts: int) -> Tensor:
        """Split into parts of equal size, shape (parts, elements), padded with zeros."""
        each = -(-flat.numel() // parts)
        each += -each % self._codec.block
        missing = each * parts - flat.numel()
        return (pad(flat, (0, missing)) if missing else flat).view(parts, each)

    def _keep(self, residual: Tensor, flat: Tensor, encoded: Tensor, lost: Tensor) -> None:
        """Keep the errors of this rank's gradients, and of the sum that it encoded for all ranks.

        The second error is kept by the rank that made it: sent with its next gradients, it is added
        to the same sum (as in DoubleSqueeze, Tang et al., ICML 2019).
        """
        torch.sub(flat, self._codec.decode(encoded).view(-1)[: flat.numel()], out=residual)
        each = lost.numel()
        place = residual[self._rank * each : (self._rank + 1) * each]
        place.add_(lost.view(-1)[: place.numel()])


# The descriptors name these; the arguments are those of every compressor.


def bf16(_numbers: Numbers, _seed: int, group: dist.ProcessGroup | None) -> CodecCompressor:
    """Return a compressor to bfloat16."""
    return CodecCompressor(Half("bf16"), group)


def fp16(_numbers: Numbers, _seed: int, group: dist.ProcessGroup | None) -> CodecCompressor:
    """Return a compressor to float16."""
    return CodecCompressor(Half("fp16"), group)


def int8(_numbers: Numbers, _seed: int, group: dist.ProcessGroup | None) -> CodecCompressor:
    """Return a compressor to blocks of 8-bit integers."""
    return CodecCompressor(Blockwise(), group)
