"""A thread that carries out a group's MPI calls one after the other.

Why a thread with blocking calls: on shared memory Open MPI's blocking Allreduce of 25 MB is about
three times as fast as Iallreduce, which only advances while somebody calls MPI. Why no rank blocks
before all are there: a blocking call spins while it waits for a late peer, and here it would take
the core from the backward pass that still runs; it also could not be given up. So each operation
begins with a non-blocking barrier that is polled with sleeps, and only then blocks.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, RankFailed
from paceline.train.collectives.mpi_work import WATCH_SHARE, MpiWork, poll, timed_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI


class ProgressThread:
    """Carries out operations in the order of submission, each within `limit_s`.

    After the first failure nothing is called any more: every later operation fails with it.
    The threads are daemons, so a call that MPI never returns from does not keep the process alive.
    """

    def __init__(self, rank: int, limit_s: float, name: str) -> None:
        self.failure: PacelineError | None = None
        self._rank = rank
        self._limit_s = limit_s
        self._queue: queue.SimpleQueue[tuple[MpiWork, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._current: tuple[MpiWork, float] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"mpi-{name}", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name=f"mpi-watch-{name}", daemon=True)
        self._thread.start()
        self._watcher.start()

    def submit(
        self,
        name: str,
        call: Callable[[], None],
        tensors: list[Any],
        meet: Callable[[], MPI.Request] | None = None,
    ) -> MpiWork:
        """Queue `call`; with `meet` (a barrier that it starts), once every rank has come to it."""
        work = MpiWork(name, self._rank, self._limit_s, tensors)

        def operation() -> None:
            if meet is not None and not poll(meet(), self._limit_s):
                raise timed_out(name, self._rank, self._limit_s)
            call()

        self._queue.put((work, operation))
        return work

    def close(self, limit_s: float) -> None:
        """End the threads after what is queued; a thread stuck in MPI is left behind."""
        self._queue.put(None)
        self._thread.join(limit_s)
        self._closing.set()
        self._watcher.join(limit_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, operation = item
            if self.failure is not None:
                work.finish(self.failure)
                continue
            self._current = (work, time.monotonic())
            try:
                operation()
            except Exception as error:  # noqa: BLE001  (handed to whoever waits for the work)
                self._fail(work, error)
            else:
                self._current = None
                work.finish()
            # Nothing of this operation may outlive it: the next get() can block for long.
            del item, work, operation

    def _watch(self) -> None:
        """Fail the operation that MPI does not return from; nothing can cancel the call."""
        while not self._closing.wait(self._limit_s * WATCH_SHARE):
            current = self._current
            if current is None or time.monotonic() - current[1] < self._limit_s:
                continue
            self._fail(current[0], timed_out(current[0].name, self._rank, self._limit_s))

    def _fail(self, work: MpiWork, error: Exception) -> None:
        if self.failure is None:
            if isinstance(error, PacelineError):
                self.failure = error
            else:
                self.failure = RankFailed(
                    f"rank {self._rank}: MPI {work.name} failed: {error}", self._rank
                )
                self.failure.__cause__ = error
        self._current = None
        work.finish(self.failure)
