"""A thread that carries out a group's operations one after the other, in the order of submission.

It is for libraries that block and that every rank must call in the same order. The backward pass
continues in the meantime.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, RankFailed
from paceline.transports.base import timed_out
from paceline.transports.work import WATCH_SHARE, PendingWork

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.transports.recorder import Operation


class ProgressThread:
    """Carries out operations in the order of submission, each within `limit_s`.

    After the first failure no operation is called any more: every later one fails with the same
    error. The threads are daemons, so a call that never returns does not keep the process alive.
    """

    def __init__(self, library: str, rank: int, limit_s: float, name: str) -> None:
        """library: name of the library, for messages. name: name of the group."""
        self.failure: PacelineError | None = None
        self._library = library
        self._rank = rank
        self._limit_s = limit_s
        self._queue: queue.SimpleQueue[
            tuple[PendingWork, Callable[[], None], Operation | None] | None
        ] = queue.SimpleQueue()
        self._current: tuple[PendingWork, float] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{library}-{name}", daemon=True)
        self._limiter = threading.Thread(
            target=self._enforce_limit, name=f"{library}-limit-{name}", daemon=True
        )
        self._thread.start()
        self._limiter.start()

    def submit(
        self,
        name: str,
        call: Callable[[], None],
        tensors: list[Any],
        operation: Operation | None = None,
    ) -> PendingWork:
        """Queue `call`. `operation` is its entry in the communication records."""
        work = PendingWork(f"{self._library} {name}", self._rank, self._limit_s, tensors)
        self._queue.put((work, call, operation))
        return work

    def close(self, limit_s: float) -> None:
        """End the threads after the queued operations; a blocked thread is abandoned."""
        self._queue.put(None)
        self._thread.join(limit_s)
        self._closing.set()
        self._limiter.join(limit_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, call, operation = item
            if self.failure is not None:
                work.finish(self.failure)
                continue
            self._current = (work, time.monotonic())
            try:
                if operation is not None:
                    operation.start()
                call()
            except Exception as error:  # noqa: BLE001  (raised in the thread that waits)
                self._fail(work, error)
            else:
                self._current = None
                if operation is not None:
                    operation.end()
                work.finish()
            # Release the operation's objects: the next get() can block for a long time.
            del item, work, call, operation

    def _enforce_limit(self) -> None:
        """Fail an operation whose library call does not return; the call cannot be cancelled."""
        while not self._closing.wait(self._limit_s * WATCH_SHARE):
            current = self._current
            if current is None or time.monotonic() - current[1] < self._limit_s:
                continue
            self._fail(current[0], timed_out(current[0].name, self._rank, self._limit_s))

    def _fail(self, work: PendingWork, error: Exception) -> None:
        if self.failure is None:
            if isinstance(error, PacelineError):
                self.failure = error
            else:
                self.failure = RankFailed(
                    f"rank {self._rank}: {work.name} failed: {error}", self._rank
                )
                self.failure.__cause__ = error
        self._current = None
        work.finish(self.failure)
