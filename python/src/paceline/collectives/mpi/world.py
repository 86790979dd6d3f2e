"""MPI_COMM_WORLD: values of all ranks, barrier and abort for the job, names of ranks; and waits.

Importing this initialises MPI, but not torch, which takes a second in which other ranks would wait,
and is imported only after a rank has its cores. Waits have a limit and do not spin.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from paceline.collectives.errors import TimedOut, timed_out
from paceline.collectives.host import host_name

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
