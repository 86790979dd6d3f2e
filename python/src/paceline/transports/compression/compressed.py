"""Compression beside the backward pass: buckets one after the other in a thread of its own.

A compressor may need several collectives for a bucket, each with the result of the previous one.
Submitted from the transport's futures they would have a different order on every rank. One thread
that processes the buckets in order keeps the same order, and blocks no other thread. On a GPU a
second stream replaces the thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.transports.compression.base import Meter, only_tensor
from paceline.transports.progress import ProgressThread

if TYPE_CHECKING:
    from paceline.transports.compression.base import Bucket, Compressor

_CLOSE_LIMIT_S = 10.0
_ABORT_LIMIT_S = 0.5


class CompressedSum:
    """Sums buckets with a compressor.

    rank: world rank, for messages. limit_s: limit of a collective, enforced by the transport; after
    twice that time the thread gives up a bucket by itself.
    """

    def __init__(self, compressor: Compressor, ranks: int, rank: int, limit_s: float) -> None:
        self._compressor = compressor
        self._meter = Meter(ranks)
        self._rank = rank
        self._limit_s = limit_s
        self._thread: ProgressThread | None = None
        self._stream: torch.cuda.Stream | None = None

    def start(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        if buffer.is_cuda:
            return self._start_on_stream(bucket)
        if self._thread is None:
            self._thread = ProgressThread("compressed", self._rank, 2 * self._limit_s, "gradients")
        work = self._thread.submit(self._compressor.name, lambda: self._sum(bucket), [buffer])
        summed: torch.futures.Future[Tensor] = work.get_future().then(only_tensor)
        return summed

    def describe(self) -> dict[str, Any]:
        method = {"method": self._compressor.name, **self._compressor.describe()}
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
        if self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        summed: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device])
        with torch.cuda.stream(self._stream):
            self._sum(bucket)
            buffer.record_stream(self._stream)
            summed.set_result(buffer)
        return summed
