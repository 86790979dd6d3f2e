"""How DistributedDataParallel's gradient buckets are summed, and when.

DDP compares the hook's annotations with the classes themselves, so here, unlike elsewhere, they
must not be strings (no `from __future__ import annotations`).
"""

from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from paceline.training.devices import Mark, Stopwatch
from paceline.transports.compression.base import GradientSum


class Buckets:
    """Watches DDP's buckets go: their sizes, and when the last one was ready on this rank."""

    def __init__(self, watch: Stopwatch, total: GradientSum) -> None:
        """total: what sums them."""
        self._watch = watch
        self.total = total
        self.ready: Mark = watch.mark()
        self.sizes_bytes: list[int] = []
        self._current: list[int] = []

    def saw(self, bucket: GradBucket) -> None:
        self.ready = self._watch.mark()
        buffer = bucket.buffer()
        self._current.append(buffer.numel() * buffer.element_size())
        if bucket.is_last():
            self.sizes_bytes, self._current = self._current, []

    def describe(self) -> dict[str, Any]:
        return {"bucket_bytes": self.sizes_bytes, **self.total.describe()}


def sum_gradients(buckets: Buckets, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook: sum a bucket over all ranks, in place, beside the backward pass."""
    buckets.saw(bucket)
    return buckets.total.start(bucket)
