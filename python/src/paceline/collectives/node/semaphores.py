"""Semaphores, bounded waits and signals between processes of a node (sem_overview(7), ctypes).

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
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_int, c_long, c_uint, c_void_p

import numpy as np
from numpy.typing import NDArray

from paceline.collectives.errors import EnvironmentLacks, PeerLost, TimedOut
from paceline.collectives.host import Process

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


# --- bounded waits for ranks of the node that notice peers that failed, left or were killed ------

_SLICE_S = 0.2  # time within which a killed peer is noticed; a check costs tens of microseconds
_HERE, _LEFT, _FAILED = 0, 1, 2
LOSS_BYTES = 128


class PeerMonitor:
    """Waits for other ranks, no longer than the limit and no longer than they live."""

    def __init__(
        self,
        local_rank: int,
        processes: Mapping[int, Process],
        states: NDArray[np.uint8],
        losses: NDArray[np.uint8],
        limit_s: float,
        names: Sequence[str] = (),
    ) -> None:
        """processes: processes of the node's ranks, by local rank. states: shared, shape
        (ranks,). losses: shared, shape (ranks, LOSS_BYTES), initially 0: why a rank left. names: of
        the ranks in messages, by local rank, if they have better ones."""
        self._names = names
        self.local_rank = local_rank
        self._processes = {
            rank: process for rank, process in processes.items() if rank != local_rank
        }
        self._states = states
        self._losses = losses
        self.limit_s = limit_s
        self._late = ""  # who did not come within the limit, and so made this rank fail

    def announce_failure(self) -> None:
        if self._states[self.local_rank] == _HERE:
            self._tell(self._late)
            self._states[self.local_rank] = _FAILED

    def announce_leave(self, loss: str = "") -> None:
        """Announce that this rank ends, unless it has failed.

        loss: of another rank, if that is the reason, in ASCII.
        """
        if self._states[self.local_rank] == _HERE:
            self._tell(loss)
            self._states[self.local_rank] = _LEFT

    def _tell(self, loss: str) -> None:
        text = loss.encode("ascii", "replace")[:LOSS_BYTES]
        self._losses[self.local_rank, : len(text)] = list(text)

    def take(
        self,
        semaphores: Semaphores,
        index: int,
        awaited: Callable[[], Sequence[int]],
        deadline: float,
        explain: Callable[[], str],
    ) -> None:
        """Take one from a semaphore; deadline is a value of time.monotonic().

        awaited: the ranks that must do something before it is posted. Raises PeerLost if any rank
        of the node fails or dies, or one of those leaves; TimedOut with `explain()` in the message.
        """
        while not semaphores.take(index, max(0.0, min(_SLICE_S, deadline - time.monotonic()))):
            try:
                self._look_for_lost(awaited())
            except PeerLost:
                # It may have been posted, by a rank that then left, after the last slice.
                if semaphores.take(index, 0.0):
                    break
                raise
            if time.monotonic() >= deadline:
                late = ", ".join(map(self.name, awaited()))
                self._late = f"{late} did not come within {self.limit_s:g} s" if late else ""
                raise TimedOut(
                    f"{self.name(self.local_rank)} waited {self.limit_s:g} s for {explain()}. "
                    "Look at their logs; if they only need more time, increase "
                    "limits.collective_s in the spec, or the timeout of the process group"
                )
        self._look_for_failed()

    def name(self, local_rank: int) -> str:
        """Return the name of a rank for messages."""
        return self._names[local_rank] if self._names else f"local rank {local_rank} of this node"

    def check(self) -> None:
        """Raise PeerLost if a rank of the node has failed or died, without waiting."""
        self._look_for_lost(())

    def deadline(self) -> float:
        return time.monotonic() + self.limit_s

    def _look_for_failed(self) -> None:
        # bytes.find takes a tenth of the time of a numpy comparison, and this runs at every signal.
        failed = self._states.tobytes().find(_FAILED)
        if failed >= 0:
            raise self._lost(failed, "has failed")

    def _look_for_lost(self, awaited: Sequence[int]) -> None:
        self._look_for_failed()
        # Read before the states, so that a rank that leaves in between is not reported as dead.
        ended = {rank: each.pid for rank, each in self._processes.items() if not each.is_alive()}
        for rank, pid in ended.items():  # the reason why others leave
            if self._states[rank] == _HERE:
                raise self._lost(rank, f"(process {pid}) has died")
        for rank in self._processes:
            if rank in awaited and self._states[rank] == _LEFT:
                raise self._lost(rank, "has left")

    def _lost(self, rank: int, how: str) -> PeerLost:
        what = f"{self.name(rank)} {how}"
        first = self._losses[rank].tobytes().rstrip(b"\0").decode("ascii")
        chain = f"{first}, so {what}" if first else what
        return PeerLost(
            f"{chain} while {self.name(self.local_rank)} waited; the cause is in its log",
            loss=first or what,
        )


# --- signals between ranks of one node: a barrier, and slots that one rank fills for another -----


class Barrier:
    """A barrier, created by SharedNode.barrier. It also makes earlier writes of a member visible to
    the others.

    In round r each member posts to the member 2^r places after it and takes from the one 2^r places
    before it, so that after log2(members) rounds it has heard of all (dissemination: Hensgen,
    Finkel, Manber, International Journal of Parallel Programming 17, 1988). A member that is a
    barrier ahead only increases the count. Two processes on two cores need about 10 microseconds
    if they arrive at the same time. Spinning before the sleep would save most of that, but would
    cost a time slice (milliseconds) if the cores are busy or there are more processes than cores.
    """

    def __init__(
        self,
        members: Sequence[int],
        semaphores: Semaphores,
        arrivals: NDArray[np.int64],
        peer_monitor: PeerMonitor,
    ) -> None:
        """arrivals: shared, shape (members,), at first 0: how often each has come, for messages."""
        self._members = tuple(members)
        self._semaphores = semaphores
        self._arrivals = arrivals
        self._peers = peer_monitor

    @staticmethod
    def semaphores_needed(members: int) -> int:
        return members * _rounds(members)

    def wait(self) -> None:
        """Wait until all members have called this.

        Raises TimedOut naming the absent ranks, PeerLost if a member failed or died.
        """
        own, size = self._position(), len(self._members)
        deadline = self._peers.deadline()
        self._arrivals[own] += 1
        for number in range(_rounds(size)):
            self._semaphores.post(number * size + (own + 2**number) % size)
            self._peers.take(
                self._semaphores,
                number * size + own,
                lambda: self._absent(own),
                deadline,
                lambda: self._explain(own),
            )

    def _position(self) -> int:
        if self._peers.local_rank not in self._members:
            raise ValueError(f"local rank {self._peers.local_rank} is not one of {self._members}")
        return self._members.index(self._peers.local_rank)

    def _absent(self, own: int) -> list[int]:
        """Return the local ranks that have come less often than this one."""
        behind = np.flatnonzero(self._arrivals < self._arrivals[own])
        return [self._members[position] for position in behind]

    def _explain(self, own: int) -> str:
        absent = self._absent(own)
        if not absent:
            return "the others, which have all come, to go on"
        return f"{', '.join(map(self._peers.name, absent))} to meet"


def _rounds(members: int) -> int:
    return (members - 1).bit_length()


class Channel:
    """One direction between two ranks; created by SharedNode.channel.

    In a step the sender calls begin(), then fills each slot that it uses and calls post(). The
    receiver calls wait() for each of those, reads it, and finally calls release(). Both must agree
    on the slots of a step, which may differ between steps.
    """

    def __init__(
        self,
        sender: int,
        receiver: int,
        slots: list[NDArray[np.uint8]],
        semaphores: Semaphores,
        peer_monitor: PeerMonitor,
    ) -> None:
        """slots: shared memory, each of shape (slot_bytes,)."""
        self._sender, self._receiver = sender, receiver
        self._slots = slots
        self._semaphores = semaphores
        self._peers = peer_monitor
        self._begun = False
        self._seen: set[int] = set()

    @staticmethod
    def semaphores_needed(slots: int) -> int:
        """Return the number of semaphores: one per slot (filled) and one per step (all slots
        read)."""
        return slots + 1

    def slot(self, index: int) -> NDArray[np.uint8]:
        """Return the bytes of a slot, shape (slot_bytes,), aligned to 64 bytes."""
        self._require(self._sender, self._receiver)
        return self._slots[index]

    def begin(self) -> None:
        """Wait, as the sender, until the receiver has read the previous step.

        Call it before writing the first slot of a step. Raises TimedOut, PeerLost.
        """
        self._require(self._sender)
        if self._begun:
            self._take(len(self._slots), self._receiver, "to release its slots")
        self._begun = True

    def post(self, index: int) -> None:
        """Announce, as the sender, that slot `index` is filled; once a step."""
        self._require(self._sender)
        self._semaphores.post(self._checked(index))

    def wait(self, index: int) -> None:
        """Wait, as the receiver, until slot `index` is filled; a second call in a step returns at
        once.

        Raises TimedOut, PeerLost.
        """
        self._require(self._receiver)
        if index not in self._seen:
            self._take(self._checked(index), self._sender, f"to fill slot {index}")
            self._seen.add(index)

    def release(self) -> None:
        """Announce, as the receiver, that all slots of this step are read and may be
        overwritten."""
        self._require(self._receiver)
        self._seen.clear()
        self._semaphores.post(len(self._slots))

    def _take(self, semaphore: int, peer: int, purpose: str) -> None:
        deadline = self._peers.deadline()
        self._peers.take(
            self._semaphores,
            semaphore,
            lambda: [peer],
            deadline,
            lambda: f"{self._peers.name(peer)} {purpose}",
        )

    def _checked(self, index: int) -> int:
        if not 0 <= index < len(self._slots):
            raise IndexError(f"slot {index} of {len(self._slots)}")
        return index

    def _require(self, *ranks: int) -> None:
        if self._peers.local_rank not in ranks:
            raise ValueError(f"local rank {self._peers.local_rank} is not at this end")
