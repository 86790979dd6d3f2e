"""POSIX semaphores in memory shared by processes (sem_overview(7)), through ctypes.

Why not words and futex(2): POSIX (4.12, Memory Synchronization) guarantees on every processor that
a process whose `sem_wait` succeeds sees what another process wrote before its `sem_post`. A word
stored by Python guarantees that only on x86, where stores become visible in order; ARM reorders
them, and Python has no memory barrier. Semaphores also need no system call unless a process sleeps,
they count (so a fast rank may be a round ahead), and they have no owner that could die with a lock.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_long, c_uint, c_void_p
from typing import TYPE_CHECKING

from paceline.collectives.errors import EnvironmentLacks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LINE_BYTES = 64  # a cache line per semaphore; sem_t has 32 bytes on Linux
_ACROSS_PROCESSES = 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", c_long), ("nanoseconds", c_long))


class _Library:
    """Functions of the C library.

    Functions that never sleep are called while holding the GIL, because releasing and reacquiring
    it can take longer (5 ms if another thread computes in Python) than the call. Functions that
    sleep release it.
    """

    def __init__(self) -> None:
        brief = ctypes.PyDLL(None, use_errno=True)
        sleeping = ctypes.CDLL(None, use_errno=True)
        self.init = _declare(brief.sem_init, c_void_p, c_int, c_uint)
        self.post = _declare(brief.sem_post, c_void_p)
        self.try_wait = _declare(brief.sem_trywait, c_void_p)
        self.clock = time.CLOCK_MONOTONIC
        try:
            clock_wait = _declare(sleeping.sem_clockwait, c_void_p, c_int, c_void_p)
        except AttributeError:  # glibc before 2.30 and musl: setting the clock back prolongs a wait
            self.clock = time.CLOCK_REALTIME
            self.timed_wait = _declare(sleeping.sem_timedwait, c_void_p, c_void_p)
            return
        self.timed_wait = lambda semaphore, until: clock_wait(semaphore, self.clock, until)


def _declare(function: Callable[..., int], *argument_types: object) -> Callable[..., int]:
    function.argtypes = argument_types  # type: ignore[attr-defined]
    return function


class Semaphores:
    """Counters, initially 0, one per 64 bytes of shared memory."""

    def __init__(self, memory: NDArray[np.uint8], *, initialise: bool) -> None:
        """memory: shape (64 * count,), 64-byte aligned, the same bytes in all processes.

        initialise: True in one of the processes, before the others use them. Raises
        EnvironmentLacks if the C library has no such semaphores.
        """
        try:
            self._library = _Library()
        except (AttributeError, OSError) as error:
            raise EnvironmentLacks(
                "sharing memory between the processes of a node needs the POSIX semaphores of "
                f"Linux's C library; loading them failed: {error}. Without shared memory there is "
                'local strategy "processes" with transport "gloo"'
            ) from error
        self._memory = memory  # keeps the addresses below valid
        start = memory.ctypes.data
        self._addresses = range(start, start + len(memory), LINE_BYTES)
        if initialise:
            for address in self._addresses:
                _check(self._library.init(address, _ACROSS_PROCESSES, 0))

    def __len__(self) -> int:
        return len(self._addresses)

    def post(self, index: int) -> None:
        """Add one; wakes a sleeping process."""
        _check(self._library.post(self._addresses[index]))

    def take(self, index: int, timeout_s: float) -> bool:
        """Take one, sleeping up to `timeout_s`. Return False if there was none.

        It also returns False early after a signal, so that Python's signal handler runs.
        """
        library, address = self._library, self._addresses[index]
        if library.try_wait(address) == 0:
            return True
        until_ns = time.clock_gettime_ns(library.clock) + int(timeout_s * 1e9)
        until = _TimeSpec(*divmod(until_ns, 10**9))
        if library.timed_wait(address, byref(until)) == 0:
            return True
        if ctypes.get_errno() in {errno.ETIMEDOUT, errno.EINTR}:
            return False
        raise _error()


def _check(result: int) -> None:
    if result != 0:
        raise _error()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
