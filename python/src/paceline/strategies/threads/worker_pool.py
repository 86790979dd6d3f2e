"""A few threads that work in step: each on cores of its own, with intra-op threads of its own.

Python runs one thread at a time, but torch lets go of the interpreter in every operation and for
the whole of a backward pass, and numpy in its loops over arrays: such threads do run at once.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from paceline.errors import EnvironmentLacks, RankFailed, TimedOut
from paceline.records.rows import WorkerEnvironment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

# A thread that is told to end does so at the next layer; one layer of VGG16 takes a second or so.
_END_S = 5.0


class Stopped(Exception):  # noqa: N818  (no error: the thread is to end)
    """Raised in a thread of a pool that is being closed, to leave what it is at."""


@dataclass(frozen=True, slots=True)
class _Result:
    """What a thread's task gave, or the exception that ended it."""

    worker: int
    value: Any
    error: BaseException | None


class WorkerPool:
    """`len(cores)` daemon threads named `paceline-replica-<i>`, which do the same task at once."""

    def __init__(
        self, cores: Sequence[Sequence[int]], threads: int, rank: int, wait_s: float, task_s: float
    ) -> None:
        """Start them and wait until each has its cores and threads.

        cores: of each thread; threads: intra-op threads of each. wait_s: how long the threads may
        wait for one another in `meet`; task_s: how long a task may take. Raises EnvironmentLacks
        if a thread does not have what it was given.
        """
        self._rank = rank
        self._wait_s = wait_s
        self._task_s = task_s
        self._barrier = threading.Barrier(len(cores))
        self._here = [0] * len(cores)  # barriers that each thread has come to
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
        """Do task(worker) in every thread at once; the results in the workers' order.

        If one raises, RankFailed with its name is raised here at once, whatever the others are at,
        and the pool is good for nothing but to be closed. Raises TimedOut if a thread waited too
        long for the others.
        """
        for tasks in self._tasks:
            tasks.put(task)
        return self._collect(self._task_s)

    def barrier(self, worker: int) -> None:
        """In a task: wait until all threads have come here.

        Raises TimedOut naming the absent after `wait_s`, Stopped if the pool is being closed.
        """
        self._here[worker] += 1
        try:
            self._barrier.wait(self._wait_s)
        except threading.BrokenBarrierError:
            if self._stopped.is_set():
                raise Stopped from None
            absent = [n for n, times in enumerate(self._here) if times < self._here[worker]]
            names = ", ".join(map(str, absent)) or "others"
            raise TimedOut(
                f"rank {self._rank}: replica {worker} waited more than {self._wait_s:g} s for "
                f"replica {names}; are its cores busy with something else? Raise "
                "limits.collective_s if a step takes that long"
            ) from None

    def raise_if_stopped(self, *_: object) -> None:
        """In a task: raise Stopped if the pool is being closed. Fits as a hook of a module."""
        if self._stopped.is_set():
            raise Stopped

    def close(self) -> None:
        """End the threads; waits a few seconds for what they are at. Harmless when called again."""
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
            try:
                result = self._results.get(timeout=max(0.0, until_s - time.monotonic()))
            except Empty:
                raise TimedOut(
                    f"rank {self._rank}: its replicas' threads did not finish within {limit_s:g} s"
                ) from None
            if result.error is not None:
                self._stopped.set()
                self._barrier.abort()
                raise self._failure(result.worker, result.error) from result.error
            values[result.worker] = result.value
        return values

    def _failure(self, worker: int, error: BaseException) -> Exception:
        if isinstance(error, EnvironmentLacks | TimedOut):
            return type(error)(str(error))
        traceback.print_exception(error)  # to the rank's log: the message has no place for it
        return RankFailed(
            f"rank {self._rank}: replica {worker} of {len(self._threads)} failed: "
            f"{type(error).__name__}: {error}; the rank's log tells where",
            self._rank,
        )

    def _work(self, worker: int, cores: Sequence[int], threads: int) -> None:
        """Life of a thread."""
        self._results.put(_attempt(worker, lambda _: bind_thread(worker, cores, threads)))
        while (task := self._tasks[worker].get()) is not None:
            if self._stopped.is_set():
                return
            result = _attempt(worker, task)
            if not self._stopped.is_set():
                self._results.put(result)
            del task, result  # a thread that waits for work holds nothing of the last


def bind_thread(worker: int, cores: Sequence[int], threads: int) -> WorkerEnvironment:
    """Give the calling thread its cores and intra-op threads, and read back what it has.

    Both belong to the thread on Linux: sched_setaffinity(2) with 0 means the caller, and OpenMP
    keeps a number of threads for each thread that asks. Raises EnvironmentLacks if what is found
    is not what was asked.
    """
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise EnvironmentLacks(
            f"replica {worker}: expected to run on cores {sorted(cores)}, the system says: {error}"
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
            f"{found.intraop_threads} on cores {found.affinity}; may this process set its affinity?"
        )
    return found


def _attempt(worker: int, task: Callable[[int], Any]) -> _Result:
    try:
        return _Result(worker, task(worker), None)
    except BaseException as error:  # noqa: BLE001  (raised again in the main thread)
        return _Result(worker, None, error)
