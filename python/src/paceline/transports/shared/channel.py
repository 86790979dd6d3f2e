"""Slots of memory that one rank of a node fills and another reads, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from paceline.transports.shared.peer_monitor import PeerMonitor
    from paceline.transports.shared.semaphores import Semaphores


class Channel:
    """One direction between two ranks; made by SharedNode.channel.

    A step: the sender calls begin(), then for each slot that it uses fills it and calls post(); the
    receiver calls wait() for each of those, reads it, and at the end release(). Which slots are
    used may differ from step to step, if both agree.
    """

    def __init__(
        self,
        sender: int,
        receiver: int,
        slots: list[NDArray[np.uint8]],
        semaphores: Semaphores,
        peer_monitor: PeerMonitor,
    ) -> None:
        """slots: shared, each of shape (slot_bytes,)."""
        self._sender, self._receiver = sender, receiver
        self._slots = slots
        self._semaphores = semaphores
        self._peers = peer_monitor
        self._begun = False
        self._seen: set[int] = set()

    @staticmethod
    def semaphores_needed(slots: int) -> int:
        """One for each slot (it is filled) and one for the step (all are read)."""
        return slots + 1

    def slot(self, index: int) -> NDArray[np.uint8]:
        """The bytes of a slot, shape (slot_bytes,); each begins at a multiple of 64 bytes."""
        self._require(self._sender, self._receiver)
        return self._slots[index]

    def begin(self) -> None:
        """Sender, before it writes the first slot of a step: waits until the last step is read.

        Raises TimedOut, PeerLost.
        """
        self._require(self._sender)
        if self._begun:
            self._take(len(self._slots), self._receiver, "to release its slots")
        self._begun = True

    def post(self, index: int) -> None:
        """Sender: slot `index` is filled; once a step."""
        self._require(self._sender)
        self._semaphores.post(self._checked(index))

    def wait(self, index: int) -> None:
        """Receiver: until slot `index` is filled; again in the same step, it returns at once.

        Raises TimedOut, PeerLost.
        """
        self._require(self._receiver)
        if index not in self._seen:
            self._take(self._checked(index), self._sender, f"to fill slot {index}")
            self._seen.add(index)

    def release(self) -> None:
        """Receiver: it has read all slots of this step, and the sender may write them again."""
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
            raise ValueError(f"local rank {self._peers.local_rank} has not this end of the channel")
