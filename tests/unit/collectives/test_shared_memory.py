"""Threads that share an array stand for processes that share memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import pytest

from paceline.collectives.shared_memory import SLOTS, SharedSegments, segment_bytes, shares

LIMIT_S = 20
SIZES = (1, 2, 3, 5)


@pytest.fixture(params=SIZES)
def run(request):
    """run(task): task(segments, rank) on every rank at once; the results by rank."""
    size = request.param
    memory = np.zeros(segment_bytes(size), np.uint8)
    meeting = threading.Barrier(size)
    ranks = [SharedSegments(memory, r, size, lambda _: meeting.wait(LIMIT_S)) for r in range(size)]

    def run(task):
        def guarded(rank):
            try:
                return task(ranks[rank], rank)
            except BaseException:
                meeting.abort()
                raise

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(guarded, range(size)))

    run.size = size
    return run


def values(rank, length, dtype):
    return drawn(rank, length, dtype).copy()


@lru_cache(maxsize=8)
def drawn(rank, length, dtype):
    return (np.random.default_rng(rank).standard_normal(length) * 50).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8])
@pytest.mark.parametrize("length", [0, 1, 3, 1000, 40_000, 1_300_001])
def test_all_ranks_get_the_very_same_sum(run, dtype, length):
    def task(segments, rank):
        buffer = values(rank, length, dtype)
        segments.allreduce(buffer, np.add)
        return buffer

    expected = values(0, length, dtype)
    for rank in range(1, run.size):
        expected = np.add(expected, values(rank, length, dtype))  # in the order of the ranks
    for buffer in run(task):
        np.testing.assert_array_equal(buffer, expected)


def test_messages_of_changing_length_follow_one_another_without_a_mix_up(run):
    lengths = [5, 700_001, 0, 3, 900_000, 20, 20, 20, 400_000]

    def task(segments, rank):
        sums = []
        for number, length in enumerate(lengths):
            buffer = np.full(length, 10.0**rank + number, np.float64)
            segments.allreduce(buffer, np.add)
            sums.append(buffer)
        return sums

    for sums in run(task):
        for number, (length, buffer) in enumerate(zip(lengths, sums, strict=True)):
            expected = sum(10.0**rank + number for rank in range(run.size))
            np.testing.assert_array_equal(buffer, np.full(length, expected))


@pytest.mark.parametrize("length", [1, 1000, 1_300_001])
def test_owners_reduce_their_shares_and_hand_them_out(run, length):
    owners = max(1, run.size - 1)

    def task(segments, rank):
        buffer = values(rank, length, np.int64)
        parts = shares(buffer, owners)
        segments.reduce_scatter(parts, np.add)
        share = parts.get(rank, buffer[:0])
        reduced = share.copy()
        share *= 2  # what the hosts exchange meanwhile
        segments.all_gather(parts)
        return reduced, buffer

    expected = sum(values(rank, length, np.int64) for rank in range(run.size))
    results = run(task)
    np.testing.assert_array_equal(np.concatenate([share for share, _ in results]), expected)
    for _, buffer in results:
        np.testing.assert_array_equal(buffer, expected * 2)


@pytest.mark.parametrize("lengths", [(0, 0, 0), (3, 0, 5), (700_001, 9, 300_000)])
def test_parts_of_any_size_are_reduced_on_their_owners_and_nothing_else_changes(run, lengths):
    def task(segments, rank):
        parts = {
            owner: values(10 * rank + owner, length, np.float32)
            for owner, length in enumerate(lengths[: run.size])
        }
        before = {owner: part.copy() for owner, part in parts.items()}
        segments.reduce_scatter(parts, np.add)
        for owner, part in parts.items():
            if owner != rank:
                np.testing.assert_array_equal(part, before[owner])
        return parts.get(rank)

    for owner, reduced in enumerate(run(task)[: len(lengths)]):
        expected = values(owner, lengths[owner], np.float32)
        for rank in range(1, run.size):
            expected = expected + values(10 * rank + owner, lengths[owner], np.float32)
        np.testing.assert_array_equal(reduced, expected)


@pytest.mark.parametrize("length", [0, 7, 2_500_000])
def test_single_part_is_a_broadcast_from_any_rank(run, length):
    def task(segments, rank):
        received = []
        for root in range(run.size):
            buffer = values(rank, length, np.uint8)
            segments.all_gather({root: buffer})
            received.append(buffer)
        return received

    for received in run(task):
        for root, buffer in enumerate(received):
            np.testing.assert_array_equal(buffer, values(root, length, np.uint8))


def test_memory_is_bounded_and_leaves_room_for_every_rank():
    for size in (1, 2, 8, 64, 1000):
        assert segment_bytes(size) <= 200 * 2**20
        assert segment_bytes(size) >= 3 * size * size * 64


def test_message_begins_in_the_slot_after_the_last_of_the_one_before():
    """A slower rank may still read the slot before."""
    segments = SharedSegments(np.zeros(segment_bytes(1), np.uint8), 0, 1, lambda _: None)
    chunk = segments._areas.shape[2]
    turn = 0
    for chunks in (1, 1, 2, 1, 5, 3):
        segments.allreduce(np.zeros(chunks * chunk, np.uint8), np.add)
        turn = (turn + chunks) % SLOTS
        assert segments._turn == turn
