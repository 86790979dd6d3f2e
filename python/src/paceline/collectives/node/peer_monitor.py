"""Bounded waits for ranks of the node that notice peers that failed, left or were killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.collectives.errors import PeerLost, TimedOut
from paceline.collectives.host import Process
from paceline.collectives.node.semaphores import Semaphores

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
        self._limit_s = limit_s

    def announce_failure(self) -> None:
        self._states[self.local_rank] = _FAILED

    def announce_leave(self, loss: str = "") -> None:
        """Announce that this rank ends, unless it has failed.

        loss: of another rank, if that is the reason, in ASCII.
        """
        if self._states[self.local_rank] == _HERE:
            text = loss.encode("ascii", "replace")[:LOSS_BYTES]
            self._losses[self.local_rank, : len(text)] = list(text)
            self._states[self.local_rank] = _LEFT

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
                raise TimedOut(
                    f"{self.name(self.local_rank)} waited {self._limit_s:g} s for {explain()}. "
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
        return time.monotonic() + self._limit_s

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
