"""Sum DistributedDataParallel's gradient buckets, and record when they are ready.

DDP compares the annotations of the hook with classes, so this module has no `from __future__ import
annotations`, unlike all others.
"""

from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from paceline.training.devices import Mark, Stopwatch
from paceline.transports.compression.base import GradientSum


class Buckets:
    """Record the sizes of DDP's buckets, and when the last one was ready on this rank."""

    def __init__(self, stopwatch: Stopwatch, gradient_sum: GradientSum) -> None:
        """gradient_sum: sums the buckets over the ranks."""
        self._stopwatch = stopwatch
        self.gradient_sum = gradient_sum
        self.ready: Mark = stopwatch.mark()
        self.sizes_bytes: list[int] = []
        self._current: list[int] = []

    def record(self, bucket: GradBucket) -> None:
        self.ready = self._stopwatch.mark()
        buffer = bucket.buffer()
        self._current.append(buffer.numel() * buffer.element_size())
        if bucket.is_last():
            self.sizes_bytes, self._current = self._current, []

    def describe(self) -> dict[str, Any]:
        return {"bucket_bytes": self.sizes_bytes, **self.gradient_sum.describe()}


def sum_gradients(buckets: Buckets, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket over all ranks in place, beside the backward pass (DDP communication hook)."""
    buckets.record(bucket)
    return buckets.gradient_sum.start(bucket)
