"""Signals between ranks of one node: a barrier, and slots that one rank fills for another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.node.peer_monitor import PeerMonitor
from paceline.node.semaphores import Semaphores

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Barrier:
    """A barrier, created by SharedNode.barrier. It also makes earlier writes of a member visible to
    the others.

    Every member has a semaphore for every other member: it posts all of its own, then takes one
    from each of the others. A member that is a round ahead only increases the count. Two processes
    on two cores need about 10 microseconds if they arrive at the same time. Spinning before the
    sleep would save most of that, but would cost a time slice (milliseconds) if the cores are busy
    or there are more processes than cores.
    """

    def __init__(
        self, members: Sequence[int], semaphores: Semaphores, peer_monitor: PeerMonitor
    ) -> None:
        self._members = tuple(members)
        self._semaphores = semaphores
        self._peers = peer_monitor

    @staticmethod
    def semaphores_needed(members: int) -> int:
        return members**2

    def wait(self) -> None:
        """Wait until all members have called this.

        Raises TimedOut naming the absent local ranks, PeerLost if a member failed or died.
        """
        own = self._position()
        others = [position for position in range(len(self._members)) if position != own]
        deadline = self._peers.deadline()
        for position in others:
            self._semaphores.post(self._index(own, position))
        missing = list(others)
        while missing:
            self._peers.take(
                self._semaphores,
                self._index(missing[0], own),
                self._members[missing[0]],
                deadline,
                lambda: self._absent(missing, own),
            )
            del missing[0]

    def _position(self) -> int:
        if self._peers.local_rank not in self._members:
            raise ValueError(f"local rank {self._peers.local_rank} is not one of {self._members}")
        return self._members.index(self._peers.local_rank)

    def _index(self, poster: int, taker: int) -> int:
        return poster * len(self._members) + taker

    def _absent(self, missing: list[int], own: int) -> str:
        absent = [
            self._members[position]
            for position in missing
            if not self._semaphores.take(self._index(position, own), 0.0)
        ]
        return f"local ranks {', '.join(map(str, absent))} to meet"


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
            self._semaphores, semaphore, peer, deadline, lambda: f"local rank {peer} {purpose}"
        )

    def _checked(self, index: int) -> int:
        if not 0 <= index < len(self._slots):
            raise IndexError(f"slot {index} of {len(self._slots)}")
        return index

    def _require(self, *ranks: int) -> None:
        if self._peers.local_rank not in ranks:
            raise ValueError(f"local rank {self._peers.local_rank} is not at this end")
