"""A pool of threads that run the same task at once, each on its own cores with its own intra-op
threads.

Python runs one thread at a time, but torch releases the interpreter lock (GIL) in every operation
and during the whole backward pass, and numpy releases it in loops over arrays. So these threads run
in parallel.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from paceline.base.errors import EnvironmentLacks, RankFailed, TimedOut
from paceline.measure.records.rows import WorkerEnvironment

T = TypeVar("T")

# A thread that must end does so at the next layer; one layer of VGG16 takes about a second.
_END_S = 5.0


class Stopped(Exception):  # noqa: N818  (not an error: it ends a task)
    """Raised in a thread of a pool that is being closed, to leave the current task."""


_Result = tuple[int, Any, BaseException | None]  # worker, what its task returned or raised


class WorkerPool:
    """`len(cores)` daemon threads named `paceline-replica-<i>` that run the same task at once."""

    def __init__(
        self, cores: Sequence[Sequence[int]], threads: int, rank: int, wait_s: float, task_s: float
    ) -> None:
        """Start the threads, and wait until each has its cores and threads.

        cores: cores of each thread. threads: intra-op threads of each thread. wait_s: limit of a
        wait in `barrier`. task_s: limit of a task. Raises EnvironmentLacks if a thread does not get
        what was requested.
        """
        self._rank = rank
        self._wait_s = wait_s
        self._task_s = task_s
        self._barrier = threading.Barrier(len(cores))
        self._arrivals = [0] * len(cores)  # number of barriers that each thread has reached
        self._stopped = threading.Event()
        self._tasks: list[SimpleQueue[Callable[[int], Any] | None]] = [SimpleQueue() for _ in cores]
        self._results: SimpleQueue[_Result] = SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(worker, own, threads),
                name=f"paceline-replica-{worker}",
                daemon=True,
            )
            for worker, own in enumerate(cores)
        ]
        for thread in self._threads:
            thread.start()
        try:
            self.workers: list[WorkerEnvironment] = self._collect(wait_s)
        except BaseException:
            self.close()
            raise

    def run(self, task: Callable[[int], T]) -> list[T]:
        """Run task(worker) in every thread at once, and return the results in the order of the
        workers.

        If a task raises, RankFailed with its replica is raised here at once, whatever the others
        do, and the pool can only be closed. Raises TimedOut if a thread waited too long for the
        others.
        """
        for tasks in self._tasks:
            tasks.put(task)
        return self._collect(self._task_s)

    def barrier(self, worker: int) -> None:
        """Wait, inside a task, until all threads have called this.

        Raises TimedOut naming the absent threads after `wait_s`, Stopped if the pool is being
        closed.
        """
        self._arrivals[worker] += 1
        try:
            self._barrier.wait(self._wait_s)
        except threading.BrokenBarrierError:
            if self._stopped.is_set():
                raise Stopped from None
            own = self._arrivals[worker]
            absent = [n for n, arrivals in enumerate(self._arrivals) if arrivals < own]
            names = ", ".join(map(str, absent)) or "others"
            raise TimedOut(
                f"rank {self._rank}: replica {worker} waited more than {self._wait_s:g} s for "
                f"replica {names}. If other programs use its cores, stop them; if a step takes "
                "that long, increase limits.collective_s"
            ) from None

    def raise_if_stopped(self, *_: object) -> None:
        """Raise Stopped, inside a task, if the pool is being closed. It can be registered as a
        module hook."""
        if self._stopped.is_set():
            raise Stopped

    def close(self) -> None:
        """End the threads; waits a few seconds for their current layer. A second call does
        nothing."""
        self._stopped.set()
        self._barrier.abort()
        for tasks in self._tasks:
            tasks.put(None)
        until_s = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _collect(self, limit_s: float) -> list[Any]:
        values: list[Any] = [None] * len(self._threads)
        until_s = time.monotonic() + limit_s
        for _ in self._threads:
            left_s = max(0.0, until_s - time.monotonic())
            try:
                worker, value, error = self._results.get(timeout=left_s)
            except Empty:
                raise TimedOut(
                    f"rank {self._rank}: the threads of its replicas did not finish within "
                    f"{limit_s:g} s"
                ) from None
            if error is not None:
                self._stopped.set()
                self._barrier.abort()
                raise self._failure(worker, error) from error
            values[worker] = value
        return values

    def _failure(self, worker: int, error: BaseException) -> Exception:
        if isinstance(error, EnvironmentLacks | TimedOut):
            return type(error)(str(error))
        traceback.print_exception(error)  # to the rank's log, because it is too long for a message
        return RankFailed(
            f"rank {self._rank}: replica {worker} of {len(self._threads)} failed: "
            f"{type(error).__name__}: {error}; the stack trace is in the rank's log",
            self._rank,
        )

    def _work(self, worker: int, cores: Sequence[int], threads: int) -> None:
        """Run tasks until the pool is closed."""
        self._results.put(_attempt(worker, lambda _: bind_thread(worker, cores, threads)))
        while (task := self._tasks[worker].get()) is not None:
            if self._stopped.is_set():
                return
            result = _attempt(worker, task)
            if not self._stopped.is_set():
                self._results.put(result)
            del task, result  # a waiting thread must not keep the last task's objects alive


def bind_thread(worker: int, cores: Sequence[int], threads: int) -> WorkerEnvironment:
    """Give the calling thread its cores and intra-op threads, and read back what it has.

    On Linux both belong to the thread: sched_setaffinity(2) with 0 means the caller, and OpenMP
    keeps a number of threads for each thread. Raises EnvironmentLacks if the result differs from
    the request.
    """
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise EnvironmentLacks(
            f"replica {worker}: expected to run on cores {sorted(cores)}, but the system refused: "
            f"{error}"
        ) from error
    torch.set_num_threads(threads)
    found = WorkerEnvironment(
        worker=worker,
        thread_id=threading.get_native_id(),
        intraop_threads=torch.get_num_threads(),
        affinity=sorted(os.sched_getaffinity(0)),
    )
    if found.intraop_threads != threads or found.affinity != sorted(cores):
        raise EnvironmentLacks(
            f"replica {worker}: expected {threads} intra-op threads on cores {sorted(cores)}, got "
            f"{found.intraop_threads} on cores {found.affinity}; check that this process may set "
            "its CPU affinity"
        )
    return found


def _attempt(worker: int, task: Callable[[int], Any]) -> _Result:
    try:
        return worker, task(worker), None
    except BaseException as error:  # noqa: BLE001  (re-raised in the main thread)
        return worker, None, error
