"""The heap of the C library, simulated: how much memory blocks need that come and go.

Ranks keep freed memory (resources.keep_freed_memory), so all tensors are in one heap that only
grows. glibc takes the smallest free chunk that is large enough, else it extends the heap. torch and
oneDNN ask for aligned blocks. For these, glibc looks for a larger chunk and frees what it cuts off.
Small objects then use some of these remainders for a while. Meanwhile a freed block cannot join its
neighbour, and its chunk is too small for the next block of the same size. glibc 2.38 improved this
("malloc: Enable merging of remainders in memalign", bug 30723).
"""

from __future__ import annotations

import bisect
import itertools
import random
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_HEADER_BYTES = 16  # of a chunk
_CUT_BYTES = 96  # by which a chunk must be larger: 64 of alignment, and the smallest chunk
# Share of the remainders that small objects use until the end of the pass. Fitted to the private
# memory of cifar-cnn (512 images) and AlexNet (4 and 64 images) with glibc 2.36.
_USED_REMAINDERS = 0.1
_SEEDS = range(9)  # of the simulations, of which the median counts
_REPETITIONS = 3  # of a step; later ones find all the gaps that they need


@dataclass(frozen=True, slots=True)
class HeapEvent:
    """Allocation of a block, or with size None its release."""

    block: int  # a number of its own, from 1
    size: int | None  # bytes


# The end of a backward pass: the small objects of the pass are gone.
PASS_ENDED = HeapEvent(0, None)


class Heap:
    """Free chunks by address, and the end of the heap."""

    def __init__(self, seed: int) -> None:
        """seed: decides which remainders are used."""
        self.size = 0
        self._free: list[tuple[int, int]] = []  # (start, end), ascending, none beside another
        self._blocks: dict[int, tuple[int, int]] = {}
        self._used: list[tuple[int, int]] = []  # remainders
        self._random = random.Random(seed)  # noqa: S311  (a simulation, not a secret)

    def allocate(self, block: int, size: int) -> None:
        start, end = self._chunk(size + _HEADER_BYTES + _CUT_BYTES)
        stop = start + size + _HEADER_BYTES
        self._blocks[block] = (start, stop)
        if self._random.random() < _USED_REMAINDERS:
            self._used.append((stop, stop + _CUT_BYTES))
            stop += _CUT_BYTES
        if stop < end:
            bisect.insort(self._free, (stop, end))

    def end_pass(self) -> None:
        """Release the remainders that small objects have used."""
        used, self._used = self._used, []
        for remainder in used:
            self._join(*remainder)

    def release(self, block: int) -> None:
        self._join(*self._blocks.pop(block))

    def _join(self, start: int, end: int) -> None:
        """Add a free chunk, together with those beside it."""
        place = bisect.bisect(self._free, (start, end))
        if place < len(self._free) and self._free[place][0] == end:
            end = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == start:
            place -= 1
            start = self._free.pop(place)[0]
        self._free.insert(place, (start, end))

    def _chunk(self, size: int) -> tuple[int, int]:
        """Take the smallest free chunk of at least this size; extend the heap if there is none."""
        fitting = [(end - start, start) for start, end in self._free if end - start >= size]
        if fitting:
            found, start = min(fitting)
            self._free.remove((start, start + found))
            return start, start + found
        start = self.size
        if self._free and self._free[-1][1] == self.size:
            start = self._free.pop()[0]
        self.size = start + size
        return start, self.size


def heap_bytes(
    events: Sequence[HeapEvent], kept: Iterable[int] = (), freed: Iterable[int] = ()
) -> int:
    """Return the size to which the heap grows in steps with these events.

    What a step leaves, for example gradients, is released before the next one.
    kept: sizes of blocks that the first step leaves for good, such as the optimiser's state.
    freed: sizes of blocks that have been released before the first step.
    """
    kept, freed = list(kept), list(freed)
    return round(statistics.median(_simulated(seed, events, kept, freed) for seed in _SEEDS))


def _simulated(
    seed: int, events: Sequence[HeapEvent], kept: Sequence[int], freed: Sequence[int]
) -> int:
    heap = Heap(seed)
    numbers = itertools.count(-1, -1)  # of blocks that are not in the events
    earlier = {next(numbers): size for size in freed}
    for block, size in earlier.items():
        heap.allocate(block, size)
    for block in earlier:
        heap.release(block)
    for repetition in range(_REPETITIONS):
        left: set[int] = set()
        for event in events:
            if event is PASS_ENDED:
                heap.end_pass()
            elif event.size is None:
                heap.release(event.block)
                left.discard(event.block)
            else:
                heap.allocate(event.block, event.size)
                left.add(event.block)
        if repetition == 0:
            for size in kept:
                heap.allocate(next(numbers), size)
        for block in sorted(left):
            heap.release(block)
        heap.end_pass()
    return heap.size


def interleaved(events: Sequence[HeapEvent], count: int) -> list[HeapEvent]:
    """Return the events of threads that do the same at the same time with blocks of their own."""
    return [
        event if event is PASS_ENDED else HeapEvent(count * event.block + number, event.size)
        for event in events
        for number in range(1 if event is PASS_ENDED else count)
    ]


def followed_by(events: Sequence[HeapEvent], sizes: Iterable[int]) -> list[HeapEvent]:
    """Return the events with further blocks of these sizes at the end of the step."""
    last = max((event.block for event in events), default=0)
    return [*events, *(HeapEvent(last + n, size) for n, size in enumerate(sizes, start=1))]
