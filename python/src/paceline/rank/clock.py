"""Clock offsets of other hosts relative to rank 0."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from paceline.transports.store import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.plan.rank_context import RankContext
    from paceline.torch_internals import Store

_ROUNDS = 8


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


def measure_offset(
    store: Store,
    context: RankContext,
    hosts: Sequence[str],
    limit_s: float,
    now: Callable[[], float] = time.time,
) -> ClockOffset:
    """Measure the offset; collective over all ranks. It is exactly 0 on rank 0's host, which has
    the same clock. hosts: by rank."""
    if context.is_first:
        for rank, host in enumerate(hosts):
            if host != context.host:
                _answer(store, rank, limit_s, now)
        return SAME_CLOCK
    if context.host == hosts[0]:
        return SAME_CLOCK
    return best_offset([_ask(store, context.rank, n, limit_s, now) for n in range(_ROUNDS)])


def _ask(
    store: Store, rank: int, number: int, limit_s: float, now: Callable[[], float]
) -> tuple[float, float, float]:
    if number == 0:  # ranks are served in turn, so wait for the turn before the first round
        wait_for(store, [f"clock/turn/{rank}"], limit_s, f"rank {rank}: its turn to read the clock")
    key = f"clock/answer/{rank}/{number}"
    asked = now()
    store.set(f"clock/question/{rank}/{number}", "?")
    wait_for(store, [key], limit_s, f"rank {rank}: rank 0's clock")
    answered = now()
    return asked, float(bytes(store.get(key)).decode()), answered


def _answer(store: Store, rank: int, limit_s: float, now: Callable[[], float]) -> None:
    store.set(f"clock/turn/{rank}", "")
    for number in range(_ROUNDS):
        wait_for(store, [f"clock/question/{rank}/{number}"], limit_s, f"rank {rank}'s question")
        store.set(f"clock/answer/{rank}/{number}", repr(now()))
