"""What changes slowly, or costs much to read, is read less often than the host is sampled."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_EARLY_S = 0.05  # beats come a little early as often as late


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where time comes from; replaced in tests."""

    unix_s: Callable[[], float] = time.time
    monotonic_s: Callable[[], float] = time.monotonic
    cpu_s: Callable[[], float] = time.thread_time  # of the calling thread


class Seldom(Generic[T]):
    """Calls `read` at most every so many seconds, and so seldom that it takes no more than that
    share of a core; says in between what it said last."""

    def __init__(
        self,
        read: Callable[[], T],
        clocks: Clocks | None = None,
        *,
        every_s: float = 1.0,
        cpu_share: float = 0.0005,
    ) -> None:
        self._read = read
        self._clocks = clocks or Clocks()
        self._every_s = every_s
        self._cpu_share = cpu_share
        self._next_s = self._rested_s = float("-inf")
        self._last: T

    def get(self, *, fresh: bool = False) -> T:
        """`fresh` asks for it before its turn too, though not for more of the core."""
        now_s = self._clocks.monotonic_s()
        if now_s >= self._next_s or (fresh and now_s >= self._rested_s):
            started_s = self._clocks.cpu_s()
            self._last = self._read()
            cost_s = self._clocks.cpu_s() - started_s
            self._rested_s = now_s + cost_s / self._cpu_share
            self._next_s = max(self._rested_s, now_s + self._every_s - _EARLY_S)
        return self._last
