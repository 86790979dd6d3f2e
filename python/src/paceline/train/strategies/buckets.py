"""How DistributedDataParallel's gradient buckets are averaged, and when.

DDP compares the hook's annotations with the classes themselves, so here, unlike elsewhere, they
must not be strings (no `from __future__ import annotations`).
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from paceline.train.devices import Mark, Stopwatch


class Buckets:
    """Watches DDP's buckets go: their sizes, and when the last one was ready on this rank."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self.ready: Mark = watch.mark()
        self.sizes_bytes: list[int] = []
        self._current: list[int] = []

    def saw(self, bucket: GradBucket) -> None:
        self.ready = self._watch.mark()
        buffer = bucket.buffer()
        self._current.append(buffer.numel() * buffer.element_size())
        if bucket.is_last():
            self.sizes_bytes, self._current = self._current, []


def sum_gradients(buckets: Buckets, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook: sum a bucket over all ranks, in place, beside the backward pass."""
    buckets.saw(bucket)
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    summed: torch.futures.Future[Tensor] = work.get_future().then(_only_tensor)
    return summed


def _only_tensor(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    return future.value()[0]
