"""Staleness and counts of updates, from rows of which every number is known."""

from __future__ import annotations

import dataclasses

import polars as pl
import pytest

from paceline.analysis.equivalence.record_checks import update_check
from paceline.analysis.trial.stragglers import staleness
from paceline.measure.records.rows import UpdateRow


def rows_of(*rows):
    """rows: (rank that wrote it, event, worker, sequence, shards, staleness, lead)."""
    names = ("event", "worker", "sequence", "shards", "staleness", "lead_steps")
    found = []
    for rank, *values in rows:
        row = UpdateRow(step=0, **dict(zip(names, values, strict=True)))
        found.append({"rank": rank, **dataclasses.asdict(row)})
    return pl.DataFrame(found, infer_schema_length=None)


PUSHED = [(w, "pushed", w, n, 2, None, None) for w in (0, 1) for n in (0, 1)]
APPLIED = [(s, "applied", w, n, None, w + n, n) for s in (0, 1) for w in (0, 1) for n in (0, 1)]


def test_distribution_is_over_all_shards_and_repeats():
    found = staleness([rows_of(*PUSHED, *APPLIED), rows_of((0, "applied", 0, 0, None, 9, 0))])
    assert (found.updates, found.max, found.lead_steps_max) == (9, 9, 1)
    assert found.mean == pytest.approx((2 * (0 + 1 + 1 + 2) + 9) / 9)
    assert found.p95 == pytest.approx(6.2)  # between 2 and 9, 0.6 of the way
    assert staleness([]) is None


def test_complete_counts_pass():
    check = update_check(rows_of(*PUSHED, *APPLIED), None)
    assert check.passed
    assert check.reason == "4 updates, each applied once by every shard"


@pytest.mark.parametrize(
    ("applied", "fault"),
    [
        (APPLIED[:-1], "update 1 of rank 1 was lost"),
        ([*APPLIED, APPLIED[2]], "update 0 of rank 1 was applied twice"),
        ([*APPLIED, (1, "applied", 0, 7, None, 0, 0)], "7 of rank 0 was applied, but never pushed"),
    ],
)
def test_wrong_count_fails_with_the_update(applied, fault):
    check = update_check(rows_of(*PUSHED, *applied), None)
    assert check.passed is False
    assert fault in check.reason


def test_lead_beyond_the_bound_fails():
    rows = rows_of(*PUSHED, *APPLIED)
    assert update_check(rows, 1).passed
    check = update_check(rows, 0)
    assert check.passed is False
    assert check.reason == "a worker was 1 steps ahead of the slowest, the bound is 0"
