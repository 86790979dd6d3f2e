"""Limit MPI_Finalize after a failure, because it would wait for a lost peer for ever.

Paceline's own jobs call MPI_Abort after a failure. This module is for programs that catch the error
and then end normally: Python calls MPI_Finalize at exit.
"""

from __future__ import annotations

import atexit
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.transports.progress_thread import ProgressThread

# Time before MPI_Finalize begins. On a busy machine torch's libraries alone take 8 s to unload.
_PYTHON_ENDS_S = 20.0

_watched: list[tuple[ProgressThread, float]] = []
_failed_limits_s: list[float] = []


def watch(progress: ProgressThread, limit_s: float) -> None:
    """At exit, check whether an operation failed. limit_s: limit of the thread's operations."""
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
