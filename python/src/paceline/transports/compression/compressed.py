"""Compression beside the backward pass: bucket after bucket, in a thread of its own.

A compressor may need several collectives for a bucket, each with what the one before it gave.
Issued from the futures of the transport they would come in another order on every rank; one thread
that does the buckets in their order keeps the order, and blocks nobody. On a GPU a second stream
does what the thread does here.
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

    rank: in the world, for messages. limit_s: of a collective; the transport keeps it, and after
    twice that time the thread's watcher gives up a bucket by itself.
    """

    def __init__(self, compressor: Compressor, ranks: int, rank: int, limit_s: float) -> None:
        self._compressor = compressor
        self._meter = Meter(ranks)
        self._rank = rank
        self._limit_s = limit_s
        self._lane: ProgressThread | None = None
        self._stream: torch.cuda.Stream | None = None

    def start(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        if buffer.is_cuda:
            return self._start_on_stream(bucket)
        if self._lane is None:
            self._lane = ProgressThread("compressed", self._rank, 2 * self._limit_s, "gradients")
        work = self._lane.submit(self._compressor.name, lambda: self._sum(bucket), [buffer])
        summed: torch.futures.Future[Tensor] = work.get_future().then(only_tensor)
        return summed

    def describe(self) -> dict[str, Any]:
        method = {"method": self._compressor.name, **self._compressor.describe()}
        return {"compression": method, **self._meter.describe()}

    def close(self, *, failed: bool) -> None:
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.close(_ABORT_LIMIT_S if failed else _CLOSE_LIMIT_S)

    def _sum(self, bucket: Bucket) -> None:
        with torch.no_grad():
            self._meter.count(bucket, self._compressor.sum(bucket))

    def _start_on_stream(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        """Collectives of a GPU's transport are waited for by the stream, not by the program."""
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
