"""Operations under way: what torch waits for, whatever carries them."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from paceline.errors import TimedOut

WATCH_SHARE = 1 / 20  # of the limit: how late beyond it a blocked call may be noticed

# Untyped here: torch's stub says ProcessGroup methods return it, but not how to subclass it.
_Work: Any = Work


class PendingWork(_Work):  # type: ignore[misc]  # subclasses Any, see above
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


def timed_out(operation: str, rank: int, limit_s: float) -> TimedOut:
    """operation: with the name of what carries it, "MPI allreduce"."""
    return TimedOut(
        f"rank {rank}: {operation} did not end within {limit_s:g} s (limits.collective_s): "
        "a peer did not come to it or is stuck; look at the other ranks' logs"
    )
