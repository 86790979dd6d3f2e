"""Sums of buckets: uncompressed, compressed beside the backward pass, and limited in number.

`create_sum` returns the one that a trial asks for.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collectives.device_clock import module_of
from paceline.collectives.work import ProgressThread
from paceline.measure.records.communication import CompressionResult, StrategyResult
from paceline.plan.spec.extensions import COMPRESSIONS, load_object
from paceline.plan.trials.trial import Trial
from paceline.train.transports.bucket_settings import CompressionSettings, gradient_options_of
from paceline.train.transports.compression.bucket import (
    Bucket,
    Compressor,
    GradientSum,
    Meter,
    only_tensor,
)


class PlainSum:
    """One all-reduce per bucket; any number in flight."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._meter = Meter(dist.get_world_size(group))

    def start(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        self._meter.count(bucket)
        work = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        assert work is not None
        summed: torch.futures.Future[Tensor] = work.get_future().then(only_tensor)
        return summed

    def describe(self) -> StrategyResult:
        return self._meter.describe()

    def close(self, *, failed: bool) -> None:
        """Do nothing: it has no background threads."""


class InFlight:
    """Limit another sum to n buckets in flight: a later one starts when an earlier one has
    ended."""

    def __init__(self, inner: GradientSum, most: int) -> None:
        self._inner = inner
        self._most = most
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Bucket, torch.futures.Future[Any]]] = deque()
        self._under_way = 0
        self._starting = False

    def start(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        # If the future knows the GPU, a stream that waits for it also waits for the GPU's work.
        summed: torch.futures.Future[Any] = torch.futures.Future(
            devices=None if buffer.is_cpu else [buffer.device]
        )
        # Only a chained future raises an error as such (set_exception stores it as a value).
        chained: torch.futures.Future[Tensor] = summed.then(lambda future: future.value())
        with self._lock:
            self._waiting.append((bucket, summed))
        self._start_waiting()
        return chained

    def describe(self) -> StrategyResult:
        return {**self._inner.describe(), "buckets_in_flight": self._most}

    def close(self, *, failed: bool) -> None:
        self._inner.close(failed=failed)

    def _start_waiting(self) -> None:
        """Start waiting buckets, by one thread at a time, because all ranks need the same order."""
        while True:
            with self._lock:
                if self._starting or not self._waiting or self._under_way >= self._most:
                    return
                self._starting = True
                self._under_way += 1
                bucket, summed = self._waiting.popleft()
            self._start(bucket, summed)
            with self._lock:
                self._starting = False

    def _start(self, bucket: Bucket, summed: torch.futures.Future[Any]) -> None:
        def ended(future: torch.futures.Future[Tensor]) -> None:
            with self._lock:
                self._under_way -= 1
            self._start_waiting()
            try:
                result = future.value()
            except Exception as error:  # noqa: BLE001  (raised where the sum is waited for)
                summed.set_exception(error)
            else:
                summed.set_result(result)

        future: torch.futures.Future[Any]
        try:
            future = self._inner.start(bucket)
        except Exception as error:  # noqa: BLE001  (as above)
            future = torch.futures.Future()
            future.set_exception(error)
        future.then(ended)


_CLOSE_LIMIT_S = 10.0
_ABORT_LIMIT_S = 0.5


class CompressedSum:
    """Sums buckets with a compressor, one after the other in a thread of its own.

    A compressor may need several collectives for a bucket, each with the result of the previous
    one. Submitted from the transport's futures they would have a different order on every rank. One
    thread that processes the buckets in order keeps the same order, and blocks no other thread. On
    a GPU a second stream replaces the thread.

    rank: world rank, for messages. limit_s: limit of a collective, enforced by the transport; after
    twice that time the thread gives up a bucket by itself.
    """

    def __init__(self, compressor: Compressor, ranks: int, rank: int, limit_s: float) -> None:
        self._compressor = compressor
        self._meter = Meter(ranks)
        self._rank = rank
        self._limit_s = limit_s
        self._thread: ProgressThread | None = None
        self._stream: Any = None  # of a GPU

    def start(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        if not buffer.is_cpu:
            return self._start_on_stream(bucket)
        if self._thread is None:
            self._thread = ProgressThread("compressed", self._rank, 2 * self._limit_s, "gradients")
        work = self._thread.submit(self._compressor.name, lambda: self._sum(bucket), [buffer])
        summed: torch.futures.Future[Tensor] = work.get_future().then(only_tensor)
        return summed

    def describe(self) -> StrategyResult:
        method: CompressionResult = {"method": self._compressor.name, **self._compressor.describe()}
        return {"compression": method, **self._meter.describe()}

    def close(self, *, failed: bool) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close(_ABORT_LIMIT_S if failed else _CLOSE_LIMIT_S)

    def _sum(self, bucket: Bucket) -> None:
        with torch.no_grad():
            self._meter.count(bucket, self._compressor.sum(bucket))

    def _start_on_stream(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        """Sum on a GPU: the stream waits for the transport's collectives, the program does not."""
        buffer = bucket.buffer()
        module = module_of(buffer.device)
        if self._stream is None:
            self._stream = module.Stream(buffer.device)
        self._stream.wait_stream(module.current_stream(buffer.device))
        summed: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device])
        with module.stream(self._stream):
            self._sum(bucket)
            buffer.record_stream(self._stream)
            summed.set_result(buffer)
        return summed


def create_sum(trial: Trial, group: dist.ProcessGroup | None = None) -> GradientSum:
    """Return the sum over the ranks of `group`, or over all; the process group must be open."""
    options = gradient_options_of(trial)
    found: GradientSum
    if options.compression is None:
        found = PlainSum(group)
    else:
        compressor = create_compressor(options.compression, trial.training.seed, group)
        found = CompressedSum(
            compressor,
            ranks=dist.get_world_size(group),
            rank=dist.get_rank(),
            limit_s=trial.limits.collective_s,
        )
    if options.buckets_in_flight is not None:
        found = InFlight(found, options.buckets_in_flight)
    return found


def create_compressor(
    settings: CompressionSettings, seed: int, group: dist.ProcessGroup | None = None
) -> Compressor:
    """Return the method's compressor. seed: for what is drawn at random."""
    create = load_object(COMPRESSIONS.get(settings.method).implementation)
    compressor: Compressor = create(settings.numbers, seed, group)
    return compressor
