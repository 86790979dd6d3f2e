"""Waiting for MPI without spinning, and within a limit."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI

_SPIN_S = 50e-6  # about a timer's granularity: sleeping for less would cost as much
_LONGEST_SLEEP_S = 500e-6
_SLEEP_SHARE = 1 / 8  # of the time waited so far: bounds the latency that polling adds


def poll(request: MPI.Request, limit_s: float, status: MPI.Status | None = None) -> bool:
    """Wait for `request` without spinning; False if it is not complete within `limit_s`."""
    return poll_until(lambda: bool(request.Test(status)), limit_s)


def poll_until(done: Callable[[], bool], limit_s: float) -> bool:
    """Ask until `done` says so, without spinning; False if it does not within `limit_s`."""
    started = time.perf_counter()
    while not done():
        waited = time.perf_counter() - started
        if waited > limit_s:
            return False
        if waited > _SPIN_S:
            time.sleep(min(waited * _SLEEP_SHARE, _LONGEST_SLEEP_S))
        else:
            os.sched_yield()  # the peer may need this core to come
    return True
