"""Make the compressor of each method from its numbers; the descriptors name these functions.

seed: for what is drawn at random. group: the process group; None for all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.transports.compression.codecs import Blockwise, CodecCompressor, Half
from paceline.transports.compression.powersgd import PowerSgd
from paceline.transports.compression.terngrad import TernGrad
from paceline.transports.compression.topk import TopK

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist

    from paceline.transports.compression.bucket import Compressor

    Numbers = Mapping[str, int | float]
    Group = dist.ProcessGroup | None


def bf16(_numbers: Numbers, _seed: int, group: Group) -> Compressor:
    """Return a compressor to bfloat16."""
    return CodecCompressor(Half("bf16"), group)


def fp16(_numbers: Numbers, _seed: int, group: Group) -> Compressor:
    """Return a compressor to float16."""
    return CodecCompressor(Half("fp16"), group)


def int8(_numbers: Numbers, _seed: int, group: Group) -> Compressor:
    """Return a compressor to blocks of 8-bit integers."""
    return CodecCompressor(Blockwise(), group)


def powersgd(numbers: Numbers, seed: int, group: Group) -> Compressor:
    """Return a compressor to low-rank factors."""
    return PowerSgd(int(numbers["rank"]), seed, group)


def topk(numbers: Numbers, _seed: int, group: Group) -> Compressor:
    """Return a compressor to the largest elements."""
    return TopK(numbers["density"], group)


def terngrad(_numbers: Numbers, seed: int, group: Group) -> Compressor:
    """Return a compressor to ternary gradients."""
    return TernGrad(seed, group=group)
