"""The end of a program after a peer was lost: MPI_Finalize would wait for that peer for ever.

A job of Paceline's ends with MPI_Abort where anything failed. Here are programs that catch the
error, and then just end: Python calls MPI_Finalize as its last act.
"""

from __future__ import annotations

import atexit
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.transports.progress import ProgressThread

# What comes before MPI_Finalize; torch's libraries alone take 8 s to leave a busy machine.
_PYTHON_ENDS_S = 20.0

_watched: list[tuple[ProgressThread, float]] = []
_failed_limits_s: list[float] = []


def watch(progress: ProgressThread, limit_s: float) -> None:
    """Look at the end whether anything failed there. limit_s: of its operations."""
    if not _watched:
        atexit.register(_limit_the_end)
    _watched.append((progress, limit_s))


def note_failure(limit_s: float) -> None:
    """A message did not come within `limit_s`."""
    _failed_limits_s.append(limit_s)


def _limit_the_end() -> None:
    """If anything failed here, MPI_Finalize has the limit of what failed.

    By SIGALRM, since Python no longer runs when MPI_Finalize does; mpirun then ends the others.
    """
    limits_s = _failed_limits_s + [s for progress, s in _watched if progress.failure is not None]
    if limits_s:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(limits_s) + _PYTHON_ENDS_S)
