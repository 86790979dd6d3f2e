"""Signals between ranks of one node: a barrier, and slots that one rank fills for another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.collectives.node.peer_monitor import PeerMonitor
from paceline.collectives.node.semaphores import Semaphores


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
