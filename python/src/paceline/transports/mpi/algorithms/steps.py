"""What a rank does in an all-reduce, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Elements from `start` up to `stop`, as of a slice."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Send:
    """Send these elements as they are at the begin of the step."""

    peer: int
    span: Span


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive these elements; at the end of the step reduce them into the own ones, or put them
    in their place."""

    peer: int
    span: Span
    reduced: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Messages under way at the same time; the next step begins when all have ended.

    What several peers sent for the same elements is reduced in the order of the ranks, the own
    rank's among them.
    """

    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()
