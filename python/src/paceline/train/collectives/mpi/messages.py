"""Messages between two ranks under way."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from paceline.train.collectives.mpi.polling import poll
from paceline.train.collectives.work import PendingWork, timed_out

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class MpiMessage(PendingWork):
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
                raise timed_out(f"MPI {self.name}", self.rank, limit_s)
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
