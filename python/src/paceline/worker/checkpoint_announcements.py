"""Announce the steps after which all ranks write a checkpoint, through a store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_ANSWER_POLL_S = 0.01  # by a rank that has reached an announced step


class Announcements:
    """The steps that rank 0 announces, in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._count = 0

    def announce(self, step: int) -> None:
        self._store.set(f"checkpoints/{self._count}", str(step))
        self._count += 1

    def next(self) -> int | None:
        """Return the next announcement; None if there is none yet."""
        key = f"checkpoints/{self._count}"
        if not self._store.check([key]):
            return None
        self._count += 1
        return int(bytes(self._store.get(key)).decode())


class Agreement:
    """Agreement of all ranks to stop at an announced step.

    Where all ranks have to stop at that step, a single one that misses it would keep the others
    waiting. So each rank answers, and nobody stops unless all answers are good.
    """

    def __init__(self, store: Store, others: int, limit_s: float) -> None:
        """others: ranks that answer. limit_s: of the wait for their answers."""
        self._store, self._others, self._limit_s = store, others, limit_s

    def answer(self, step: int, *, in_time: bool) -> None:
        """Tell all ranks whether this one will stop at the announced step."""
        self._store.add(_answers(step, in_time=in_time), 1)

    def reached(self, step: int) -> bool:
        """Wait for all answers; return whether every rank stops at this step."""
        deadline = time.monotonic() + self._limit_s
        while time.monotonic() < deadline:
            good, bad = (self._store.add(_answers(step, in_time=t), 0) for t in (True, False))
            if good + bad >= self._others:
                return bad == 0
            time.sleep(_ANSWER_POLL_S)
        return False


def _answers(step: int, *, in_time: bool) -> str:
    return f"checkpoints/{'in-time' if in_time else 'late'}/{step}"
