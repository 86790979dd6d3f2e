"""How long to sleep between two looks at MPI, which moves messages on only when looked at."""

from __future__ import annotations

import os
import time

_SPIN_S = 50e-6  # about a timer's granularity: sleeping for less would cost as much
_SHORTEST_SLEEP_S = 20e-6
# At 1 Gbit/s 62 kB come meanwhile, and 625 kB at 10: little beside a socket's buffers of megabytes,
# and beside what Exchange has under way.
_LONGEST_SLEEP_S = 500e-6
# Of the time since the first message has come: so much later may the last be noticed. It is what
# counts between 100 kB and some MB, where half a millisecond is much of the whole.
_SLEEP_SHARE = 1 / 32
_GROWTH = 1.5
_SHRINKAGE = 0.5
_MUCH = 0.25  # of what was under way


class Patience:
    """Between looks: none at first, for short messages' sake; then sleeps as long as they may be.

    Like a network card that holds back interrupts: a look that finds nothing makes the next sleep
    longer, one that finds much makes it shorter, so that the rate of looks follows the link's.
    Spinning would be no faster (25 MB at 1 Gbit/s: 57 % of a core instead of 14 %), and takes the
    core from the backward pass.
    """

    def __init__(self) -> None:
        self._sleep_s = _SHORTEST_SLEEP_S
        self._spin_until = time.perf_counter() + _SPIN_S
        self._flows_since: float | None = None

    def pause(self, ended: int, left: int) -> None:
        """After a look.

        ended: messages that it found to have ended; left: that were under way and still are.
        """
        if ended and self._flows_since is None:
            self._flows_since = time.perf_counter()
        if ended and not left:  # what comes next has only begun
            self._spin_until = time.perf_counter() + _SPIN_S
            return
        if not ended:
            if time.perf_counter() < self._spin_until:
                os.sched_yield()  # the peer may need this core to come
                return
            self._sleep_s = min(self._sleep_s * _GROWTH, _LONGEST_SLEEP_S)
        elif ended > _MUCH * (ended + left):
            self._sleep_s = max(self._sleep_s * _SHRINKAGE, _SHORTEST_SLEEP_S)
        time.sleep(min(self._sleep_s, self._longest_sleep_s()))

    def _longest_sleep_s(self) -> float:
        if self._flows_since is None:
            return _LONGEST_SLEEP_S
        flowing_s = time.perf_counter() - self._flows_since
        return max(_SHORTEST_SLEEP_S, flowing_s * _SLEEP_SHARE)
