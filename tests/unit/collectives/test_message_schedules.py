"""All ranks' steps of each algorithm, carried out without MPI, against numpy and the formulas."""

from __future__ import annotations

from collections import defaultdict, deque
from math import log2

import numpy as np
import pytest

from paceline.collectives.message_schedules import (
    ALGORITHMS,
    MESSAGE_BYTES,
    Span,
    all_gather_ring,
    chunk_length,
    chunks,
    ring,
)

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 13)
LENGTHS = (0, 1, 2, 5, 64, 77)


class Ranks:
    """Carries out every rank's steps, as far as the messages it waits for have been sent."""

    def __init__(self, algorithm: str, size: int, length: int) -> None:
        self.values = [np.arange(length) * 10 + rank**2 for rank in range(size)]
        self.sent = 0
        self.messages: list[tuple[int, int]] = []
        self._under_way: dict[tuple[int, int], deque] = defaultdict(deque)
        waiting = deque((r, deque(ALGORITHMS[algorithm](r, size, length))) for r in range(size))
        stuck = 0
        begun = set()
        while waiting:
            rank, steps = waiting.popleft()
            if not steps:
                continue
            if rank not in begun:
                self._send(rank, steps[0])
                begun.add(rank)
            if self._receive(rank, steps[0]):
                steps.popleft()
                begun.discard(rank)
                stuck = 0
            else:
                stuck += 1
                assert stuck <= size, "all ranks wait for one another"
            waiting.append((rank, steps))
        assert not any(self._under_way.values()), "a message that nobody received"

    def _send(self, rank, step):
        for send in step.sends:
            self._under_way[rank, send.peer].append(self.values[rank][send.span.slice].copy())
            self.messages.append((rank, send.peer))
            self.sent += len(send.span)

    def _receive(self, rank, step) -> bool:
        if not all(self._under_way[receive.peer, rank] for receive in step.receives):
            return False
        for receive in step.receives:
            came = self._under_way[receive.peer, rank].popleft()
            own = self.values[rank][receive.span.slice]
            assert len(came) == len(own), "sent and received spans differ in length"
            own[:] = own + came if receive.reduced else came
        return True


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_ends_with_the_sum(algorithm, size):
    for length in LENGTHS:
        ranks = Ranks(algorithm, size, length)
        expected = np.arange(length) * 10 * size + sum(rank**2 for rank in range(size))
        for value in ranks.values:
            np.testing.assert_array_equal(value, expected)


def formulas(size: int) -> dict[str, tuple[int, int]]:
    """Messages, and elements sent for each element of the message, over all ranks."""
    power = 2 ** int(log2(size))
    rest, steps = size - power, int(log2(power))
    return {
        "ring": (2 * size * (size - 1), 2 * (size - 1)),
        "recursive-doubling": (power * steps + 2 * rest, power * steps + 2 * rest),
        "rabenseifner": (2 * power * steps + 2 * rest, 2 * (power - 1) + 2 * rest),
        "naive": (size * (size - 1), size * (size - 1)),
        "parameter-server": (2 * (size - 1), 2 * (size - 1)),
    }


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", SIZES)
def test_messages_and_elements_sent_match_the_formulas(algorithm, size):
    messages, elements = formulas(size)[algorithm]
    for length in LENGTHS:
        ranks = Ranks(algorithm, size, length)
        assert len(ranks.messages) == messages
        assert ranks.sent == elements * length


def test_ring_sends_the_least_possible_from_each_rank():
    for rank in range(4):
        sent = sum(len(s.span) for step in ALGORITHMS["ring"](rank, 4, 400) for s in step.sends)
        assert sent == 2 * 3 * 400 // 4


def test_ring_sends_only_to_the_next_rank():
    assert set(Ranks("ring", 5, 20).messages) == {(rank, (rank + 1) % 5) for rank in range(5)}


def test_all_of_parameter_servers_messages_pass_rank_0():
    assert all(0 in pair for pair in Ranks("parameter-server", 5, 20).messages)


@pytest.mark.parametrize("length", [0, 1, 9, 10, 11, 1000])
def test_pieces_cover_every_element_once_and_are_no_longer_than_asked(length):
    found = chunks(length, 10)
    assert [i for span in found for i in range(*span)] == list(range(length))
    assert all(0 < len(span) <= 10 for span in found)
    assert len(found) == -(-length // 10)


def test_pieces_of_ring_grow_with_the_ranks_so_that_messages_do_not_shrink():
    assert chunk_length("ring", 8, 4) == 8 * chunk_length("recursive-doubling", 8, 4)
    assert 8 * chunk_length("rabenseifner", 8, 8) == 2 * MESSAGE_BYTES


def test_papers_algorithms_send_25_mb_as_one_message():
    for algorithm in ("naive", "parameter-server"):
        assert chunk_length(algorithm, 4, 4) * 4 >= 25_000_000


def test_span_is_as_long_as_its_slice():
    assert len(Span(3, 8)) == 5
    assert list(range(10))[Span(3, 8).slice] == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_gives_every_rank_the_parts_of_all(size):
    known = [{rank} for rank in range(size)]
    schedules = [list(all_gather_ring(rank, size, size)) for rank in range(size)]
    for turn in range(size - 1):
        before = [set(parts) for parts in known]
        for rank, steps in enumerate(schedules):
            [send], [receive] = steps[turn].sends, steps[turn].receives
            assert set(range(*send.span)) <= before[rank], "a rank sends what it has"
            assert set(range(*receive.span)) <= before[receive.peer]
            known[rank] |= set(range(*receive.span))
    assert known == [set(range(size))] * size


@pytest.mark.parametrize("algorithm", [ring, all_gather_ring])
def test_all_rounds_of_rings_are_equal(algorithm):
    for rank in range(5):
        steps = list(algorithm(rank, 5, 100))
        shapes = {
            (
                tuple((send.peer, len(send.span)) for send in step.sends),
                tuple((receive.peer, len(receive.span)) for receive in step.receives),
            )
            for step in steps
        }
        assert len(shapes) == 1
