"""Scripts with a batch for each rank are ranked among those with equal steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.compare.ranking import with_equal_steps
from paceline.analysis.compare.run import compare_run
from paceline.analysis.equivalence.ranks import Statement


@pytest.fixture
def row(tmp_path):
    (found,) = compare_run(fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL])).rows
    return found


def rows_of(row, *kinds):
    """Return rows by samples of a step, ranks, and statement."""
    return [
        replace(
            row,
            configuration=f"{number}",
            training=replace(row.training, global_batch=samples),
            placement=replace(row.placement, ranks=ranks),
            equivalence=replace(row.equivalence, is_script=True, statement=statement),
        )
        for number, (samples, ranks, statement) in enumerate(kinds)
    ]


def ranked(rows):
    return [each.has_comparable_speed for each in rows]


ONE, RANKS = (8, 1, Statement.EQUAL), (16, 2, Statement.DATA_PARALLEL)


def test_the_largest_group_is_ranked_and_a_pair_of_ranks_before_single_ones(row):
    found = with_equal_steps(rows_of(row, ONE, ONE, RANKS, RANKS), counts=True)
    assert ranked(found) == [False, False, True, True]
    assert found[0].equivalence.other_rows == (
        "its steps have 8 samples, those of the ranked ones 16"
    )
    assert ranked(with_equal_steps(rows_of(row, ONE, ONE, RANKS), counts=True)) == [True] * 2 + [
        False
    ]


def test_equal_batches_are_ranked_together(row):
    equal = (8, 2, Statement.DATA_PARALLEL)
    assert ranked(with_equal_steps(rows_of(row, ONE, equal), counts=True)) == [True, True]


def test_where_samples_are_doubtful_ranks_with_rows_of_their_own_are_apart(row):
    unknown, equal = (None, 2, Statement.DATA_PARALLEL), (16, 2, Statement.EQUAL)
    found = with_equal_steps(rows_of(row, ONE, equal, unknown), counts=False)
    assert ranked(found) == [True, True, False]
