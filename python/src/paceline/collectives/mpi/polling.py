"""Wait for MPI within a limit and without spinning; limit MPI_Finalize after a failure."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.collectives.errors import timed_out

if TYPE_CHECKING:
    from mpi4py import MPI

    from paceline.collectives.work import ProgressThread

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
