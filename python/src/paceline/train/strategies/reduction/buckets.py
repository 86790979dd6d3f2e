"""Sum DistributedDataParallel's gradient buckets, and record when they are ready.

DDP compares the annotations of the hook with classes, so this module has no `from __future__ import
annotations`, unlike all others.
"""

import torch
from torch import Tensor

from paceline.base.torch_internals import GradBucket
from paceline.collectives.device_clock import Mark
from paceline.measure.records.communication import StrategyResult
from paceline.train.training.devices import Stopwatch
from paceline.train.transports.bucket_sums import GradientSum


class Buckets:
    """Record the sizes of DDP's buckets, and when the last one was ready on this rank."""

    def __init__(
        self, stopwatch: Stopwatch, gradient_sum: GradientSum, *, defers: bool = False
    ) -> None:
        """gradient_sum: sums the buckets over the ranks. defers: DDP's backward pass does not wait
        for the sums, but `wait` does; for gradients that are views of the buckets, on a CPU."""
        self._stopwatch = stopwatch
        self.gradient_sum = gradient_sum
        self.ready: Mark = stopwatch.mark()
        self.sizes_bytes: list[int] = []
        self._current: list[int] = []
        self._defers = defers
        self._sums: list[torch.futures.Future[Tensor]] = []

    def sum(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to sum a bucket over all ranks in place, beside the backward pass; return the
        future for which DDP is to wait (DDP communication hook)."""
        self.ready = self._stopwatch.mark()
        buffer = bucket.buffer()
        self._current.append(buffer.nbytes)
        if bucket.is_last():
            self.sizes_bytes, self._current = self._current, []
        summed = self.gradient_sum.start(bucket)
        if not self._defers:
            return summed
        self._sums.append(summed)
        nothing: torch.futures.Future[Tensor] = torch.futures.Future()
        nothing.set_result(bucket.buffer())
        return nothing

    def wait(self) -> None:
        """Wait for the sums that DDP did not wait for; raises the error of a sum."""
        sums, self._sums = self._sums, []
        for summed in sums:
            summed.wait()

    def describe(self) -> StrategyResult:
        return {"bucket_bytes": self.sizes_bytes, **self.gradient_sum.describe()}
