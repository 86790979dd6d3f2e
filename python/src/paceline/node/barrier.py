"""A barrier among ranks of one node."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.node.peer_monitor import PeerMonitor
    from paceline.node.semaphores import Semaphores


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
