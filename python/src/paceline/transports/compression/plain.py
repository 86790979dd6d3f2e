"""Sums of gradients as they are, and the limit on how many buckets are under way at once."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.transports.compression.base import Meter, only_tensor

if TYPE_CHECKING:
    from paceline.transports.compression.base import Bucket, GradientSum


class PlainSum:
    """One all-reduce a bucket; any number of them under way."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._meter = Meter(dist.get_world_size(group))

    def start(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        self._meter.count(bucket)
        work = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        assert work is not None
        summed: torch.futures.Future[Tensor] = work.get_future().then(only_tensor)
        return summed

    def describe(self) -> dict[str, Any]:
        return self._meter.describe()

    def close(self, *, failed: bool) -> None:
        """Nothing of its own runs beside."""


class InFlight:
    """At most n buckets of another sum under way: a later one starts when an earlier one ended."""

    def __init__(self, inner: GradientSum, most: int) -> None:
        self._inner = inner
        self._most = most
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Bucket, torch.futures.Future[Any]]] = deque()
        self._under_way = 0
        self._starting = False

    def start(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        summed: torch.futures.Future[Any] = torch.futures.Future()
        # An error is raised as one only by a future that is chained (set_exception stores a value).
        chained: torch.futures.Future[Tensor] = summed.then(_value)
        with self._lock:
            self._waiting.append((bucket, summed))
        self._start_waiting()
        return chained

    def describe(self) -> dict[str, Any]:
        return {**self._inner.describe(), "buckets_in_flight": self._most}

    def close(self, *, failed: bool) -> None:
        self._inner.close(failed=failed)

    def _start_waiting(self) -> None:
        """Start what may be; by one thread at a time, because the order is that of all ranks."""
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
            except Exception as error:  # noqa: BLE001  (handed to whoever waits for the sum)
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


def _value(future: torch.futures.Future[Tensor]) -> Tensor:
    return future.value()
