"""Operations in flight: the objects that torch waits for, and a thread that carries them out.

The thread is for libraries that block and that every rank must call in the same order. The backward
pass continues in the meantime.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from paceline.collectives.errors import PacelineError, RankFailed, Refused, timed_out
from paceline.collectives.torch_internals import Work, untraced

if TYPE_CHECKING:
    from paceline.collectives.recorder import Operation

# A call that limits its own waits names the absent ranks. So it has this share of the limit longer
# to raise its error, before a call that does not return is failed, in another such share.
WATCH_SHARE = 1 / 20
_LONGEST_LOOK_S = 2.0  # between two looks, for operations with a shorter limit than their group's

# Untyped: torch's stub does not describe how to subclass it.
_Work: Any = Work


@untraced
class _OneWork(_Work):  # type: ignore[misc]  # subclasses Any, see above
    """The common part of works of one operation."""

    def __init__(self, tensors: list[Any], error: Exception | None = None) -> None:
        super().__init__()
        self._tensors, self._error = tensors, error

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Any]:
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._tensors)
        else:
            future.set_exception(self._error)


@untraced
class PendingWork(_OneWork):
    """One operation in flight. Its future holds the list of result tensors."""

    def __init__(self, name: str, rank: int, limit_s: float, tensors: list[Any]) -> None:
        super().__init__(tensors)
        self.name = name
        self.rank = rank
        self.limit_s = limit_s
        self._lock = threading.Lock()  # of the end, its error and the future
        self._ended = threading.Event()
        self._future: torch.futures.Future[Any] | None = None  # made when somebody asks for it

    def finish(self, error: Exception | None = None) -> None:
        """Mark the work as ended. Only the first call counts, because two threads may call it."""
        with self._lock:
            if self._ended.is_set():
                return
            self._error = error
            self._ended.set()
            future = self._future
        if future is not None:
            self._complete(future)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end. Raises the error of the work, or TimedOut after the timeout (0: the
        group's)."""
        asked_s = timeout.total_seconds()
        if not self._ended.wait(asked_s or self.limit_s * (1 + 3 * WATCH_SHARE)):
            raise timed_out(self.name, self.rank, asked_s or self.limit_s)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future()
            has_ended = self._ended.is_set()
        if has_ended:
            self._complete(future)
        return future


@untraced
class EndedWork(_OneWork):
    """One operation that was carried out before its caller goes on: nothing waits for it."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002  (torch's name)
        """Raise the error of the work, if it has one."""
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self._error is None

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._complete(future)
        return future


@untraced
class CoalescedWork(_Work):  # type: ignore[misc]  # subclasses Any, see above
    """Several works as one, for torch's coalescing. Its future holds the list of their futures."""

    def __init__(self, works: Sequence[PendingWork]) -> None:
        super().__init__()
        self._works = list(works)
        self._future: torch.futures.Future[Any] = torch.futures.collect_all(
            [work.get_future() for work in self._works]
        )

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all works, together no longer than `timeout` (None: each has its own limit).

        Raises the error of the first work that failed.
        """
        asked_s = timeout.total_seconds() if timeout is not None else 0.0
        deadline = time.monotonic() + asked_s
        for work in self._works:
            left_s = max(deadline - time.monotonic(), 1e-3) if asked_s else 0.0
            work.wait(timedelta(seconds=left_s))
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        return next((e for work in self._works if (e := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


_Item = tuple[PendingWork, Callable[[], None], "Operation | None"]


class ProgressThread:
    """Carries out operations in the order of submission, each within `limit_s`.

    After the first failure no operation is called any more: every later one fails with the same
    error. The threads are daemons, so a call that never returns does not keep the process alive.

    A callback of a future may wait for later operations. So the thread that completes a future
    leaves the queue to another one if operations are queued, now or while it completes.
    """

    def __init__(self, library: str, rank: int, limit_s: float, name: str) -> None:
        """library: name of the library, for messages. name: name of the group."""
        self.failure: PacelineError | None = None
        self._library = library
        self._rank = rank
        self._limit_s = limit_s
        self._name = name
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._count = threading.Lock()  # of the following
        self._queued = 0  # operations that have been submitted and not been carried out
        self._unattended = True  # no thread takes the next operation from the queue
        self._spares = 0  # threads that wait for a turn at the queue
        self._turns: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: end
        self._threads: list[threading.Thread] = []
        self._current: tuple[PendingWork, float] | None = None
        self._closing = threading.Event()

    def submit(
        self,
        name: str,
        call: Callable[[], None],
        tensors: list[Any],
        operation: Operation | None = None,
        limit_s: float | None = None,
    ) -> PendingWork:
        """Queue `call`. `operation` is its entry in the communication records. limit_s: of this
        operation, if it has one of its own."""
        work = self._work(name, tensors, limit_s)
        with self._count:
            if self.failure is None:
                self._queued += 1
                self._queue.put((work, call, operation))
                self._attend()
                return work
        work.finish(self.failure)
        return work

    def carry_out(
        self,
        name: str,
        call: Callable[[], None],
        tensors: list[Any],
        operation: Operation | None = None,
        limit_s: float | None = None,
    ) -> PendingWork | EndedWork:
        """Carry out `call` in this thread, which would wait for it anyway, if nothing is queued.

        Waking another thread takes as long as a short operation. `call` must limit its own waits.
        """
        if self._queued:
            return self.submit(name, call, tensors, operation, limit_s)
        return EndedWork(tensors, self._attempt(f"{self._library} {name}", call, operation))

    def close(self, limit_s: float) -> None:
        """End the threads after the queued operations; a blocked thread is abandoned."""
        deadline = time.monotonic() + limit_s
        with self._count:
            self._queue.put(None)
            threads = list(self._threads)
        for thread in threads[1:]:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._closing.set()
        for thread in threads[:1]:  # it limits the others
            thread.join(max(0.1, deadline - time.monotonic()))

    def _attend(self) -> None:
        """Let a thread take the next operation, if none does; with `_count`."""
        if not self._unattended:
            return
        self._unattended = False
        if self._spares:
            self._spares -= 1
            self._turns.put(True)
            return
        if not self._threads:
            self._start(self._enforce_limit, f"{self._library}-limit-{self._name}")
        self._start(self._run, f"{self._library}-{self._name}")

    def _start(self, target: Callable[[], None], name: str) -> None:
        self._threads = [each for each in self._threads if each.is_alive()]
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, call, operation = item
            self._current = (work, time.monotonic())
            try:
                error = self._attempt(work.name, call, operation)
            except BaseException:  # noqa: BLE001  (the thread is needed for what comes after it)
                error = self.failure
            self._current = None
            with self._count:
                self._queued -= 1
                self._unattended = True
                if self._queued:
                    self._attend()
            work.finish(error)
            # Release the operation's objects: the next get() can block for a long time.
            del item, work, call, operation, error
            if not self._has_turn():
                return
        with self._count:
            self._queue.put(None)  # for a thread that still completes a future
            self._unattended = True
            for _ in range(self._spares):
                self._turns.put(False)
            self._spares = 0

    def _has_turn(self) -> bool:
        """Return True when this thread is to take the next operation, False to end."""
        with self._count:
            if self._unattended:
                self._unattended = False
                return True
            if self._spares:
                return False
            self._spares += 1
        return self._turns.get()

    def _work(self, name: str, tensors: list[Any], limit_s: float | None) -> PendingWork:
        limit_s = self._limit_s if limit_s is None else limit_s
        return PendingWork(f"{self._library} {name}", self._rank, limit_s, tensors)

    def _attempt(
        self, name: str, call: Callable[[], None], operation: Operation | None
    ) -> Exception | None:
        """Carry out a call, unless one before it has failed; return the error, if any.

        An exception that is no error, such as KeyboardInterrupt, fails the call for all ranks,
        because nobody knows how far it came; it is raised again.
        """
        if self.failure is not None:
            return self.failure
        try:
            if operation is not None:
                operation.start()
            call()
        except Refused as refused:
            cause = refused.__cause__
            return cause if isinstance(cause, Exception) else refused
        except Exception as error:  # noqa: BLE001  (raised in the thread that waits)
            return self._failed(name, error)
        except BaseException as error:
            self._failed(name, error)
            raise
        if operation is not None:
            operation.end()
        return None

    def _enforce_limit(self) -> None:
        """Fail an operation whose library call does not return, and those behind it; the call
        cannot be cancelled."""
        while not self._closing.wait(min(self._limit_s * WATCH_SHARE, _LONGEST_LOOK_S)):
            if (current := self._current) is None:
                continue
            work, begun = current
            if time.monotonic() - begun < work.limit_s * (1 + WATCH_SHARE):
                continue
            failure = self._failed(work.name, timed_out(work.name, self._rank, work.limit_s))
            self._current = None
            for each in [work, *self._withdrawn()]:
                each.finish(failure)

    def _withdrawn(self) -> list[PendingWork]:
        """Take all operations from the queue."""
        works = []
        with self._count, suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if item is None:
                    self._queue.put(None)
                    break
                works.append(item[0])
                self._queued -= 1
        return works

    def _failed(self, name: str, error: BaseException) -> PacelineError:
        """Return the failure of the group: this error, unless there was one before."""
        with self._count:
            if self.failure is None:
                if isinstance(error, PacelineError):
                    self.failure = error
                else:
                    text = f"rank {self._rank}: {name} failed: {str(error) or repr(error)}"
                    self.failure = RankFailed(text, self._rank)
                    self.failure.__cause__ = error
            return self.failure
