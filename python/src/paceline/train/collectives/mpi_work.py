"""Operations under way: what torch waits for."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch._C._distributed_c10d import Work

from paceline.errors import TimedOut

if TYPE_CHECKING:
    from collections.abc import Callable

_SPIN_S = 50e-6  # about a timer's granularity: sleeping for less would cost as much
_LONGEST_SLEEP_S = 500e-6
_SLEEP_SHARE = 1 / 8  # of the time waited so far: bounds the latency that polling adds
WATCH_SHARE = 1 / 20  # of the limit: how late beyond it a blocked call may be noticed


def poll(request: MPI.Request, limit_s: float, status: MPI.Status | None = None) -> bool:
    """Wait for `request` without spinning; False if it is not complete within `limit_s`."""
    started = time.perf_counter()
    while not request.Test(status):
        waited = time.perf_counter() - started
        if waited > limit_s:
            return False
        if waited > _SPIN_S:
            time.sleep(min(waited * _SLEEP_SHARE, _LONGEST_SLEEP_S))
        else:
            os.sched_yield()  # the peer may need this core to come
    return True


# Untyped here: torch's stub says ProcessGroup methods return it, but not how to subclass it.
_Work: Any = Work


class MpiWork(_Work):  # type: ignore[misc]  # subclasses Any, see above
    """One operation under way. Its future holds the list of result tensors."""

    def __init__(self, name: str, rank: int, limit_s: float, tensors: list[Any]) -> None:
        super().__init__()
        self.name = name
        self.rank = rank
        self.limit_s = limit_s
        self._tensors = tensors
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._ended = threading.Event()
        self._claim = threading.Lock()
        self._error: Exception | None = None

    def finish(self, error: Exception | None = None) -> None:
        """Mark as ended; the first call counts (the watcher and the thread may both call)."""
        if not self._claim.acquire(blocking=False):
            return
        self._error = error
        self._ended.set()
        if error is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end. Raises what went wrong, TimedOut after the timeout (0: the group's)."""
        limit_s = timeout.total_seconds() or self.limit_s * (1 + 2 * WATCH_SHARE)
        if not self._ended.wait(limit_s):
            raise timed_out(self.name, self.rank, limit_s)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Any]:
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class MpiMessage(MpiWork):
    """A message under way. MPI moves it on while somebody waits for it or asks."""

    def __init__(
        self,
        name: str,
        rank: int,
        limit_s: float,
        tensors: list[Any],
        request: MPI.Request,
        data: Any,
        deliver: Callable[[], None] = lambda: None,
    ) -> None:
        """data: the buffer, kept until the end; deliver: called once it is complete."""
        super().__init__(name, rank, limit_s, tensors)
        self._request = request
        self._data = data
        self._deliver = deliver
        self._status = MPI.Status()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit_s = timeout.total_seconds() or self.limit_s
        if not self._ended.is_set():
            if not poll(self._request, limit_s, self._status):
                raise timed_out(self.name, self.rank, limit_s)
            self._end()
        return True

    def is_completed(self) -> bool:
        if not self._ended.is_set() and self._request.Test(self._status):
            self._end()
        return self._ended.is_set()

    def get_future(self) -> torch.futures.Future[Any]:
        raise NotImplementedError("transport mpi: a message has no future, wait for it")

    def _source_rank(self) -> int:
        return int(self._status.Get_source())

    def _end(self) -> None:
        self._deliver()
        self.finish()


def timed_out(operation: str, rank: int, limit_s: float) -> TimedOut:
    return TimedOut(
        f"rank {rank}: MPI {operation} did not end within {limit_s:g} s (limits.collective_s): "
        "a peer did not come to it or is stuck; look at the other ranks' logs"
    )
