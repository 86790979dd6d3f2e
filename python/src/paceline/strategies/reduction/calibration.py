"""Measure the speeds on which the choice between all-reduce and factor exchange depends.

The measurement is collective and runs before the first step. It ends after about a second: a
transfer is repeated with twice the size until it takes long enough, and all ranks use the time of
the slowest one, so they stop at the same size and get equal results.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.costs.factor_cost import Speeds
from paceline.costs.link_cost import all_gather_bytes, all_reduce_bytes
from paceline.training.linear import weight_gradient

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.costs.factor_cost import LinearShape

_SMALL_BYTES = 1024
_SMALL_REPEATS = 5
_FIRST_BYTES, _LARGEST_BYTES = 2**16, 2**23  # 64 KiB to 8 MiB
_LARGE_REPEATS = 3
# A token bucket or a socket buffer hides the speed of the link for some milliseconds.
_LONG_ENOUGH_S, _TYPICAL_S = 0.04, 0.2
_PRODUCT_ROWS_BYTES = 2**23  # a part of the gradient that fits no cache
_PRODUCT_REPEATS = 3


def measure(
    group: dist.ProcessGroup | None,
    reducing: dist.ProcessGroup | None,
    largest: LinearShape,
    samples: int,
    dtype: torch.dtype,
) -> tuple[Speeds, bool]:
    """Return the speeds, and whether all ranks compute bit-identical products; collective over all
    ranks.

    group: gathers factors. reducing: sums gradients. Every rank belongs to one of each, and all
    groups transfer at the same time, as in training. largest: shape of the largest layer. samples:
    rows of its factors, of all ranks of the group.
    """
    ranks = dist.get_world_size(group)

    def gather(size: int) -> None:
        own = torch.zeros(size // 4)
        dist.all_gather_single(torch.empty(ranks * len(own)), own, group=group)

    def reduce(size: int) -> None:
        dist.all_reduce(torch.zeros(size // 4), group=reducing)

    for transfer in (gather, reduce):
        transfer(_SMALL_BYTES)  # opens connections
    latency_s = min(_slowest_s(partial(gather, _SMALL_BYTES)) for _ in range(_SMALL_REPEATS))
    latency_s /= ranks - 1
    gather_bytes, gather_s = _long_enough(gather)
    reduce_bytes, reduce_s = _long_enough(reduce)
    flop_per_s, checksum = _product(largest, samples, dtype)
    speeds = Speeds(
        latency_s=latency_s,
        all_gather_bytes_per_s=all_gather_bytes(gather_bytes, ranks) / gather_s,
        all_reduce_bytes_per_s=all_reduce_bytes(reduce_bytes, ranks) / reduce_s,
        product_flop_per_s=-_largest(-flop_per_s),
    )
    return speeds, _largest(checksum) == -_largest(-checksum)


def _long_enough(transfer: Callable[[int], None]) -> tuple[int, float]:
    """Return a size and its time, for a size that takes long enough to show the speed.

    It is the shortest of some times, because other processes add to them; on a slow link, where a
    time is long enough to be typical, it is the first one.
    """
    size = _FIRST_BYTES
    while True:
        run = partial(transfer, size)
        took_s = _slowest_s(run)
        is_last = size == _LARGEST_BYTES
        if is_last or _LONG_ENOUGH_S <= took_s < _TYPICAL_S:
            took_s = min(took_s, *(_slowest_s(run) for _ in range(_LARGE_REPEATS - 1)))
        if is_last or took_s >= _LONG_ENOUGH_S:
            return size, took_s
        size *= 2


def _product(shape: LinearShape, samples: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return the speed of a product of factors in flop/s, and a checksum of its bits."""
    rows = max(1, min(shape.outputs, _PRODUCT_ROWS_BYTES // (4 * shape.inputs)))
    generator = torch.Generator().manual_seed(0)

    def factor(features: int) -> Tensor:
        return torch.randn(samples, features, generator=generator).to(dtype)

    inputs, gradients = factor(shape.inputs), factor(rows)
    out = torch.empty(rows, shape.inputs)
    took_s = []
    for _ in range(1 + _PRODUCT_REPEATS):
        started_s = time.perf_counter()
        weight_gradient(inputs, gradients, out)
        took_s.append(time.perf_counter() - started_s)
    checksum = float(out.view(torch.int32).sum(dtype=torch.int64) % 2**50)
    return 2 * samples * rows * shape.inputs / min(took_s[1:]), checksum


def _slowest_s(run: Callable[[], None]) -> float:
    """Return the time of a collective on the slowest rank."""
    started_s = time.perf_counter()
    run()
    return _largest(time.perf_counter() - started_s)


def _largest(value: float) -> float:
    """Return the largest value of all ranks, on all ranks."""
    own = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return float(own)
