"""The difference between the clocks of two hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Hosts that synchronise their clocks (NTP) differ by some milliseconds.
SYNCHRONISED_S = 0.1


class ClockOffset(NamedTuple):
    """Offset to add to this rank's unix times to get rank 0's; correct within +-error_s."""

    offset_s: float
    error_s: float


SAME_CLOCK = ClockOffset(0.0, 0.0)


def best_offset(rounds: Sequence[tuple[float, float, float]]) -> ClockOffset:
    """Estimate the offset from the round with the shortest round trip (Cristian: Probabilistic
    clock synchronization, Distributed Computing 3, 1989).

    rounds: (own time at the request, the other's time, own time at the answer), in seconds.
    """
    asked, theirs, answered = min(rounds, key=lambda r: r[2] - r[0])
    return ClockOffset(theirs - (asked + answered) / 2, (answered - asked) / 2)
