"""The rows of whole trainings, from fabricated records: faults, and right ways that look odd."""

from __future__ import annotations

import random

import pytest

from paceline.analysis.equivalence.own_checks import Level
from paceline.analysis.equivalence.trained_rows import (
    changed_rows,
    judge_rows,
    later_other_step,
)
from paceline.measure.records.own_steps import Observed, TrainedRows, Update

ROWS, SHARE = 320, 8


def rows(steps, *, is_whole=True):
    return TrainedRows.of([[f"{row:x}" for row in step] for step in steps], is_whole=is_whole)


def cut(order, size):
    return [order[begin : begin + size] for begin in range(0, len(order), size)]


def shuffled(seed):
    return random.Random(seed).sample(range(1, ROWS + 1), ROWS)


def of_ranks(*orders, **more):
    return [rows(cut(order, SHARE), **more) for order in orders]


def of_one(order, **more):
    return rows(cut(order, 2 * SHARE), **more)


def reasons(ranks, alone):
    found = judge_rows(ranks, [] if alone is None else [alone])
    return [(each.level, each.step, each.reason) for each in found]


@pytest.mark.parametrize("alone_seed", [1, 2], ids=["the same order", "another order"])
def test_shares_of_one_order_are_right(alone_seed):
    order = shuffled(1)
    assert reasons(of_ranks(order[0::2], order[1::2]), of_one(shuffled(alone_seed))) == []


def test_several_epochs_and_padded_rows_are_right():
    parts: list[list[int]] = [[], []]
    for epoch in range(3):
        order = shuffled(epoch)[: ROWS - 1]
        order += order[: len(order) % 2]  # as DistributedSampler pads
        for rank in range(2):
            parts[rank] += order[rank::2]
    alone = [row for epoch in range(3) for row in shuffled(epoch)[: ROWS - 1]]
    assert reasons(of_ranks(*parts), of_one(alone)) == []


def test_rows_that_are_drawn_with_replacement_are_right():
    drawn = [random.Random(seed).choices(range(1, ROWS + 1), k=ROWS // 2) for seed in range(2)]
    alone = random.Random(0).choices(range(1, ROWS + 1), k=ROWS)
    assert [
        each for each in reasons(of_ranks(*drawn), of_one(alone)) if each[0] == Level.FAULT
    ] == []


def test_rows_that_several_ranks_have_in_one_step_count_unless_they_have_all_of_them():
    order = shuffled(1)
    shared = cut(order, 4)
    first = [row for number in range(0, 60, 2) for row in (*shared[number], *shared[number + 1])]
    other = [row for number in range(0, 60, 2) for row in (*shared[number], *shared[number + 1])]
    assert reasons(of_ranks(first, other), None) == []  # divided layers
    for number in range(0, len(other), SHARE):
        other[number : number + 4] = range(1000 + number, 1004 + number)
    [(level, step, reason)] = reasons(of_ranks(first, other), None)
    assert (level, step) == (Level.FAULT, 0)
    assert "overlap" in reason


def test_an_order_of_each_rank_is_found():
    found = reasons(of_ranks(shuffled(1)[0::2], shuffled(2)[1::2]), of_one(shuffled(1)))
    assert [(level, step) for level, step, _ in found] == [(Level.FAULT, 0)]


def test_data_that_are_divided_twice_are_found():
    order = list(range(1, ROWS + 1))
    [(level, _, reason)] = reasons(of_ranks(order[0::4], order[1::4]), of_one(order))
    assert level == Level.FAULT
    assert reason == "ranks train on 160 rows, one process on 320: 160 rows are missing"


def test_without_an_end_nothing_is_said_of_missing_rows():
    order = list(range(1, ROWS + 1))
    parts = of_ranks(order[0::4], order[1::4], is_whole=False)
    assert reasons(parts, of_one(order)) == []


def test_rows_that_repeat_after_equal_steps_are_found():
    order = list(range(1, 193))
    again = order[:80] + order[40:136]  # continues at a wrong place after five steps
    parts = [[row for step in cut(again, 16) for row in step[rank::2]] for rank in range(2)]
    [(level, step, reason)] = reasons(of_ranks(*parts), of_one(order))
    assert (level, step) == (Level.FAULT, 5)
    assert "trained on twice" in reason or "overlap" in reason


def test_ranks_at_different_places_of_one_order_are_found():
    order = list(range(1, ROWS + 1))
    ahead = order[1::2][SHARE:]
    [(level, step, reason)] = reasons(of_ranks(order[0::2], ahead), of_one(order))
    assert (level, step) == (Level.FAULT, 0)
    assert "rank 1 trains on rows of step 2 of one process, rank 0 on those of step 1" in reason
    parts = order[: ROWS // 2], order[ROWS // 2 :]
    assert reasons(of_ranks(*parts), of_one(order)) == []  # each has a range of its own
    batches = [rows(cut(part, 2 * SHARE)) for part in parts]  # of a batch for each rank
    assert reasons(batches, of_one(order)) == []


def test_unknown_rows_show_nothing():
    empty = TrainedRows.of([], is_whole=True)
    assert reasons([empty, empty], of_one(shuffled(1))) == []
    assert reasons([rows([[1], []]), rows([[2], [3]])], None) == []


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (((8, 8, 8), (8, 8, 8)), None),
        (((8, 8, 2), (8, 8, 1)), (2, 1)),
        (((8, 8, 2, 8), (8, 8, 2, 8)), (2, 2)),  # a smaller batch on all ranks
        (((8, 7, 6), (8, 7, 6)), None),  # rows of each step vary
        (((8, 7, 6), (8, 7, 5)), (2, 1)),
        (((8, 8, 0), (8, 8, 1)), None),  # not known
    ],
)
def test_a_later_step_with_other_numbers_of_rows_is_found(counts, expected):
    ranks = [rows([range(1, count + 1) for count in own]) for own in counts]
    assert later_other_step(ranks, 2) == expected


def observed(samples, generators):
    step = Update(
        step=0, optimizer=0, samples=samples, losses=[], gradient=[], weights=[], change=[],
        generators=generators,
    )  # fmt: skip
    return Observed(updates=[step])


@pytest.mark.parametrize(
    ("own", "seeds", "batch", "is_named"),
    [
        ((1, 2), ("a", "a"), "1", False),  # rows of one process
        ((3, 4), ("a", "a"), "1", True),
        ((3, 4), ("a", "b"), "1", False),  # random numbers of each rank
        ((3, 4), ("a", "a"), "9", False),  # of a DataLoader, which the model does not get
    ],
)
def test_rows_that_one_process_never_has_are_named_if_nothing_random_differs(
    own, seeds, batch, is_named
):
    ranks = [rows([[row]]) for row in own]
    those = [observed([str(row)], {"torch": seed}) for row, seed in zip(own, seeds, strict=True)]
    one = ([rows([[1, 2]])], [observed([batch], {"torch": "a"})])
    found = changed_rows((ranks, those), one)
    assert [each.level for each in found] == [Level.WEAKER] * is_named
