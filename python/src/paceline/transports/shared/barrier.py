"""A barrier among some ranks of one node."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.transports.shared.peer_monitor import PeerMonitor
    from paceline.transports.shared.semaphores import Semaphores


class Barrier:
    """Made by SharedNode.barrier. What a member wrote before it met, the others see after it.

    Every member has a semaphore for every other: it posts all of its own, then takes one from each
    that is for it. A member that is a round ahead only adds to the count. Two processes on two
    cores meet in about 10 microseconds if they come at the same time; spinning before the sleep
    would save most of that, but cost a full time slice (milliseconds) as soon as the cores are
    busy or the processes more than the cores.
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

    @property
    def members(self) -> tuple[int, ...]:
        """Local ranks."""
        return self._members

    def wait(self) -> None:
        """Wait until all members are here.

        Raises TimedOut naming the local ranks that did not come, PeerLost if one failed or died.
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
            raise ValueError(f"local rank {self._peers.local_rank} is not of {self._members}")
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
