"""Point-to-point messages of MPI, waits that end, and values of all ranks of the job."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from mpi4py import MPI

from paceline.collectives.errors import RankFailed, TimedOut, timed_out
from paceline.collectives.host import host_name
from paceline.collectives.torch_internals import untraced
from paceline.collectives.work import PendingWork

if TYPE_CHECKING:
    from paceline.collectives.work import ProgressThread


# --- wait for MPI within a limit and without spinning; limit MPI_Finalize after a failure --------

_SPIN_S = 50e-6  # about the granularity of a timer: a shorter sleep costs as much
_SHORTEST_SLEEP_S = 20e-6
# In this time 62 kB arrive at 1 Gbit/s and 625 kB at 10 Gbit/s: less than a socket buffer holds,
# and less than MessageCollectives has in flight.
_LONGEST_SLEEP_S = 500e-6
# Share of the time waited so far that poll_until sleeps. It bounds the latency that polling adds.
_WAITED_SHARE = 1 / 8
# Share of the time since the first message arrived. It bounds how late AdaptivePause notices the
# last one, which matters for messages of 100 kB to a few MB.
_FLOWING_SHARE = 1 / 32
_GROWTH = 1.5
_SHRINKAGE = 0.5
_LARGE_PART = 0.25  # of the messages that were in flight

# Requests of collectives that were given up. MPI may still write to their buffers, which a request
# keeps alive.
_abandoned: list[MPI.Request] = []


def complete(request: MPI.Request, operation: str, world_rank: int, limit_s: float) -> None:
    """Wait for `request` without spinning. Raises TimedOut if it is not complete within `limit_s`.

    operation, world_rank: for the message.
    """
    if not poll_until(request.Test, limit_s):
        _abandoned.append(request)
        raise timed_out(f"MPI {operation}", world_rank, limit_s)


def poll_until(
    done: Callable[[], bool], limit_s: float, longest_sleep_s: float = _LONGEST_SLEEP_S
) -> bool:
    """Call `done` until it returns True, without spinning. Return False after `limit_s`."""
    started = time.perf_counter()
    while not done():
        waited = time.perf_counter() - started
        if waited > limit_s:
            return False
        if waited > _SPIN_S:
            time.sleep(min(waited * _WAITED_SHARE, longest_sleep_s))
        else:
            os.sched_yield()  # the peer may need this core
    return True


class AdaptivePause:
    """The pause between two polls: none at first, for short messages, then sleeps of adaptive
    length.

    A poll that finds nothing makes the next sleep longer, a poll that finds much makes it shorter,
    as in interrupt moderation of network cards. Spinning would not be faster (25 MB at 1 Gbit/s: 57
    % of a core instead of 14 %), and it takes the core from the backward pass.
    """

    def __init__(self) -> None:
        self._sleep_s = _SHORTEST_SLEEP_S
        self._spin_until = time.perf_counter() + _SPIN_S
        self._flows_since: float | None = None

    def sleep(self, ended: int, left: int) -> None:
        """Sleep after a poll.

        ended: messages that the poll found complete. left: messages still in flight.
        """
        if ended and self._flows_since is None:
            self._flows_since = time.perf_counter()
        if ended and not left:  # the next messages have only just begun
            self._spin_until = time.perf_counter() + _SPIN_S
            return
        if not ended:
            if time.perf_counter() < self._spin_until:
                os.sched_yield()  # the peer may need this core
                return
            self._sleep_s = min(self._sleep_s * _GROWTH, _LONGEST_SLEEP_S)
        elif ended > _LARGE_PART * (ended + left):
            self._sleep_s = max(self._sleep_s * _SHRINKAGE, _SHORTEST_SLEEP_S)
        time.sleep(min(self._sleep_s, self._longest_sleep_s()))

    def _longest_sleep_s(self) -> float:
        if self._flows_since is None:
            return _LONGEST_SLEEP_S
        flowing_s = time.perf_counter() - self._flows_since
        return max(_SHORTEST_SLEEP_S, flowing_s * _FLOWING_SHARE)


# MPI_Finalize would wait for a lost peer for ever. Paceline's own jobs call MPI_Abort after a
# failure. The following is for programs that catch the error and then end normally: Python calls
# MPI_Finalize at exit.

# Time before MPI_Finalize begins. On a busy machine torch's libraries alone take 8 s to unload.
_PYTHON_ENDS_S = 20.0

_watched: list[tuple[ProgressThread, float]] = []
_failed_limits_s: list[float] = []


def limit_end_after_failure(progress: ProgressThread, limit_s: float) -> None:
    """Limit MPI_Finalize if an operation of the thread fails. limit_s: limit of its operations."""
    if not _watched:
        atexit.register(_limit_the_end)
    _watched.append((progress, limit_s))


def note_failure(limit_s: float) -> None:
    """Record that a message did not end within `limit_s`."""
    _failed_limits_s.append(limit_s)


def _limit_the_end() -> None:
    """Limit MPI_Finalize to the limit of the operation that failed, if any failed.

    SIGALRM ends the process, because Python no longer runs during MPI_Finalize; mpirun then ends
    the other ranks.
    """
    limits_s = _failed_limits_s + [s for progress, s in _watched if progress.failure is not None]
    if limits_s:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(limits_s) + _PYTHON_ENDS_S)


_PAUSE_S = 1e-3  # for futures only: a thread that waits for a message polls far more often
_LONGEST_PAUSE_S = 4e-3
_JOIN_S = 1.0

# Buffers of sends that were given up. MPI cannot cancel a send and may still read them.
_abandoned_buffers: list[Any] = []


@untraced
class MpiMessage(PendingWork):
    """A message in flight. MPI progresses it while a waiting thread or the Messenger polls."""

    def __init__(
        self,
        name: str,
        rank: int,
        limit_s: float,
        tensors: list[Any],
        request: MPI.Request,
        buffer: Any,
        ended: Callable[[], None],
    ) -> None:
        """buffer: kept alive until the end. ended: called once after completion, by the thread that
        noticed it."""
        super().__init__(name, rank, limit_s, tensors)
        self.deadline = time.monotonic() + limit_s
        self._request = request
        self._buffer = buffer
        self._when_ended = ended
        self._status = MPI.Status()
        self._asking = threading.Lock()

    def advance(self) -> bool:
        """Poll MPI once, and return whether the message has ended."""
        if self._ended.is_set():
            return True
        if not self._asking.acquire(blocking=False):
            return False  # another thread is polling
        try:
            if not self._ended.is_set() and self._request.Test(self._status):
                self._when_ended()
                self.finish()
        except Exception as error:  # noqa: BLE001  (raised in the thread that waits for the work)
            failure = RankFailed(f"rank {self.rank}: {self.name} failed: {error}", self.rank)
            failure.__cause__ = error
            self.finish(failure)
        finally:
            self._asking.release()
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end. Raises TimedOut after `timeout`, or the error of the message.

        Without a timeout, the group's limit is counted from now, and the message is given up after
        it.
        """
        asked_s = timeout.total_seconds() if timeout is not None else 0.0
        if not asked_s:
            self.deadline = time.monotonic() + self.limit_s
        if not poll_until(self.advance, asked_s or self.limit_s):
            if asked_s:
                raise timed_out(self.name, self.rank, asked_s)
            self.give_up()
        return super().wait()

    def is_completed(self) -> bool:
        return self.advance()

    def give_up(self) -> None:
        """End the message with TimedOut; MPI no longer writes into its buffer."""
        with self._asking:
            if self._ended.is_set():
                return
            if "recv" in self.name:
                self._request.Cancel()
            _abandoned_buffers.append(self._buffer)
            note_failure(self.limit_s)
            self.finish(timed_out(self.name, self.rank, self.limit_s))

    def _source_rank(self) -> int:
        return int(self._status.Get_source())


class Messenger:
    """A thread that progresses a group's messages, so that they end although no thread waits.

    The thread starts with the first message and sleeps while there is none.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._changed = threading.Condition()
        self._under_way: list[MpiMessage] = []
        self._thread: threading.Thread | None = None
        self._closing = False

    def add(self, message: MpiMessage) -> None:
        """Progress `message` from now on."""
        with self._changed:
            self._under_way.append(message)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"MPI-messages-{self._group}", daemon=True
                )
                self._thread.start()
                atexit.register(self.close)  # no MPI call may follow MPI_Finalize
            self._changed.notify()

    def close(self) -> None:
        """Stop. Messages that have not ended progress only while a thread waits for them."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
            atexit.unregister(self.close)

    def _run(self) -> None:
        pause_s = _PAUSE_S
        while self._wait_for_messages():
            time.sleep(pause_s)
            with self._changed:
                under_way = list(self._under_way)
            ended = {id(message) for message in under_way if _moved_on(message)}
            pause_s = _PAUSE_S if ended else min(2 * pause_s, _LONGEST_PAUSE_S)
            with self._changed:
                self._under_way = [m for m in self._under_way if id(m) not in ended]
            del under_way  # no reference may keep an ended message alive

    def _wait_for_messages(self) -> bool:
        """Wait until there are messages. Return False if the messenger is to close."""
        with self._changed:
            while not self._under_way and not self._closing:
                self._changed.wait()
            return not self._closing


def _moved_on(message: MpiMessage) -> bool:
    """Return whether the message has ended, or was given up because it is late."""
    if message.advance():
        return True
    if time.monotonic() < message.deadline:
        return False
    message.give_up()
    return True


# --- MPI_COMM_WORLD: values of all ranks, barrier and abort for the job, and names of ranks ------
#
# Importing this initialises MPI, but not torch, which is imported only after a rank has its cores.

_POLL_S = 0.02
_Value = TypeVar("_Value")


class World:
    """All ranks of the MPI job of this process. Construction is collective."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self._node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        self.local_rank: int = self._node.rank
        self.ranks_on_node: int = self._node.size

    def gather(self, value: _Value) -> list[_Value]:
        """Return every rank's value, by rank; collective."""
        return self._comm.allgather(value)

    def of_rank_0(self, value: _Value | None) -> _Value | None:
        """Return rank 0's value; collective."""
        found: _Value | None = self._comm.bcast(value)
        return found

    def of_this_node(self, value: _Value) -> _Value:
        """Return the value of this node's first rank; collective."""
        found: _Value = self._node.bcast(value)
        return found

    def wait_for_all(self, limit_s: float) -> None:
        """Wait for all ranks, because a trial ends with its last rank. Raises TimedOut after
        `limit_s`."""
        if not poll_until(self._comm.Ibarrier().Test, limit_s, longest_sleep_s=_POLL_S):
            raise TimedOut(f"rank {self.rank} waited {limit_s:g} s for the other ranks to finish")

    def abort(self, exit_code: int) -> None:
        """End every rank of the job at once; does not return."""
        self._comm.Abort(exit_code)


_RECORD = np.dtype([("rank", np.int64), ("host", "S256")])  # Linux host names have 64 bytes


@dataclass(frozen=True, slots=True)
class RankNames:
    """Names of ranks. A rank number within a sub-group does not identify a rank's log, its world
    rank does."""

    world_ranks: tuple[int, ...]  # by rank of the communicator
    hosts: tuple[str, ...]

    @classmethod
    def gather(cls, comm: MPI.Comm, limit_s: float) -> RankNames:
        """Exchange names; collective over `comm`. Raises TimedOut if a rank does not take part
        within `limit_s`."""
        own = np.zeros(1, _RECORD)
        own["rank"], own["host"] = MPI.COMM_WORLD.rank, host_name().encode()
        gathered = np.zeros(comm.size, _RECORD)
        # Non-blocking, because the blocking call spins and cannot be given up.
        request = comm.Iallgather(own.view(np.uint8), gathered.view(np.uint8))
        complete(request, "start of a group", MPI.COMM_WORLD.rank, limit_s)
        return cls(
            tuple(int(rank) for rank in gathered["rank"]),
            tuple(host.decode(errors="replace") for host in gathered["host"]),
        )

    def __call__(self, rank: int) -> str:
        """Return the name of a rank of the communicator, for example "rank 3 (host-b)"."""
        return f"rank {self.world_ranks[rank]} ({self.hosts[rank]})"
