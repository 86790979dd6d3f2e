"""The simulated heap: reuse of chunks, gaps, and blocks that stay."""

from __future__ import annotations

import pytest

from paceline.training import heap
from paceline.training.heap import (
    PASS_ENDED,
    Heap,
    HeapEvent,
    followed_by,
    heap_bytes,
    interleaved,
)

EXTRA = 16 + 96  # bytes of a chunk beyond its block


@pytest.fixture
def remainders(monkeypatch):
    """Set the share of remainders that small objects use."""
    return lambda share: monkeypatch.setattr(heap, "_USED_REMAINDERS", share)


def test_freed_neighbours_become_one_chunk(remainders):
    remainders(0.0)
    found = Heap(1)
    found.allocate(1, 1000)
    found.allocate(2, 1000)
    size = found.size
    found.release(1)
    found.release(2)
    found.allocate(3, 2000)
    assert found.size == size


def test_smallest_chunk_that_is_large_enough_is_taken(remainders):
    remainders(0.0)
    found = Heap(1)
    for block, size in enumerate((5000, 64, 2000, 64)):
        found.allocate(block, size)
    size = found.size
    found.release(0)
    found.release(2)
    found.allocate(4, 1900)  # into the place of block 2
    found.allocate(5, 4900)  # into that of block 0
    assert found.size == size


def test_block_does_not_fit_into_its_own_place_once_the_remainder_is_used(remainders):
    remainders(1.0)
    found = Heap(1)
    found.allocate(1, 1000)
    found.allocate(2, 64)
    size = found.size
    found.release(1)
    found.allocate(3, 1000)
    assert found.size == size + 1000 + EXTRA
    found.release(3)
    found.allocate(4, 1000 - 96)  # a smaller one fits
    assert found.size == size + 1000 + EXTRA


def test_heap_at_its_end_grows_only_by_what_is_missing(remainders):
    remainders(0.0)
    found = Heap(1)
    found.allocate(1, 1000)
    found.release(1)
    found.allocate(2, 1500)
    assert found.size == 1500 + EXTRA


STEP = [HeapEvent(1, 1000), HeapEvent(2, 500), HeapEvent(1, None)]


def test_steps_repeat_and_what_they_leave_is_replaced(remainders):
    remainders(0.0)
    assert heap_bytes(STEP) == 1000 + 500 + 16 + EXTRA


def test_state_stays_and_earlier_blocks_leave_their_place(remainders):
    remainders(0.0)
    # The state takes the place of block 1, so that the next step begins behind it.
    assert heap_bytes(STEP, kept=[900]) == 900 + 1000 + 500 + 2 * 16 + EXTRA
    assert heap_bytes(STEP, freed=[10_000]) == 10_000 + EXTRA
    assert heap_bytes([], freed=[10_000]) == 10_000 + EXTRA


def test_threads_do_the_same_with_their_own_blocks(remainders):
    remainders(0.0)
    both = interleaved(STEP, 2)
    assert [(e.block, e.size) for e in both] == [
        (2, 1000), (3, 1000), (4, 500), (5, 500), (2, None), (3, None),
    ]  # fmt: skip
    assert heap_bytes(both) == 2 * (1000 + 500) + 3 * 16 + EXTRA


def test_further_blocks_come_at_the_end_of_a_step():
    assert followed_by(STEP, [7, 8])[3:] == [HeapEvent(3, 7), HeapEvent(4, 8)]


def test_blocks_of_one_size_need_more_than_themselves():
    """About as recorded for a small convolutional network; see `_USED_REMAINDERS`."""
    step, live = [], []
    for block in range(40):
        step.append(HeapEvent(block, 8 << 20))
        live.append(block)
        if len(live) > 6:
            step.append(HeapEvent(live.pop(0), None))
    assert 1.2 < heap_bytes(step) / (7 * (8 << 20)) < 3


def test_remainders_are_whole_again_after_the_pass(remainders):
    remainders(1.0)
    found = Heap(1)
    found.allocate(1, 1000)
    found.allocate(2, 64)
    size = found.size
    found.release(1)
    found.end_pass()
    found.allocate(3, 1000)
    assert found.size == size
    assert heap_bytes([*STEP, PASS_ENDED]) == heap_bytes(STEP)
    assert interleaved([PASS_ENDED], 2) == [PASS_ENDED]
