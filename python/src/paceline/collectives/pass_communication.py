"""Communication that the layers of a replica wait for within its passes.

Batch normalisation over all replicas sums its statistics in every forward and backward pass. No
other work of the rank runs in the meantime, so this time is no computation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

# Returns the sum of a vector (float64) over all replicas, on its device; collective over them.
Total = Callable[[Tensor], Tensor]

_awaits: ContextVar[bool] = ContextVar("paceline_awaits", default=False)  # of each thread


@contextmanager
def awaiting() -> Iterator[None]:
    """Mark that this thread waits for the communication that it requests meanwhile."""
    token = _awaits.set(True)
    try:
        yield
    finally:
        _awaits.reset(token)


def is_awaiting() -> bool:
    """Return whether this thread waits for the communication that it requests now."""
    return _awaits.get()


class PassCommunication:
    """Measures the time that a thread waits for communication: of the layers of one replica, or of
    a step between nodes."""

    def __init__(self) -> None:
        self.total_s = 0.0  # so far

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Add the time of the block, in which this thread waits for its communication."""
        began_s = time.perf_counter()
        with awaiting():
            yield
        self.total_s += time.perf_counter() - began_s

    def timed(self, total: Total) -> Total:
        """Return `total` with its time measured."""

        def call(values: Tensor) -> Tensor:
            with self.measured():
                return total(values)

        return call
