"""Operations of other ranks that a rank, which has ended, will never begin."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.measure.records.communication import OperationNotes
from paceline.measure.records.layout import TrialFiles
from paceline.train.rank.spans import UnansweredOperations


@pytest.fixture
def clock(monkeypatch):
    found = SimpleNamespace(now_s=100.0)
    module = SimpleNamespace(monotonic=lambda: found.now_s)
    monkeypatch.setattr("paceline.train.rank.spans.time", module)
    return found


@pytest.fixture
def ranks(tmp_path):
    """The files of a trial of two ranks that have both ended operation 3 of their group."""
    files = TrialFiles(tmp_path)
    notes = [OperationNotes(files.rank(rank).operations) for rank in range(2)]
    for each in notes:
        each.begun("world", "allreduce", 3, 1.0)
        each.ended("world")
    return UnansweredOperations(files, 0, 2), notes


def test_an_operation_that_waits_for_some_seconds_is_found(ranks, clock):
    unanswered, (_, other) = ranks
    other.begun("world", "allreduce", 4, 2.0)
    assert unanswered.find() is None
    clock.now_s += 4.0
    assert unanswered.find() is None
    clock.now_s += 2.0
    rank, operation = unanswered.find()
    assert (rank, operation.operation, operation.sequence) == (1, "allreduce", 4)


def test_operations_that_go_on_are_none(ranks, clock):
    unanswered, (_, other) = ranks
    for sequence in range(4, 8):
        other.begun("world", "allreduce", sequence, sequence)
        assert unanswered.find() is None
        clock.now_s += 4.0
        other.ended("world")
    assert unanswered.find() is None


@pytest.mark.parametrize(("group", "sequence"), [("of others", 9), ("world", 3)])
def test_operations_that_this_rank_has_begun_or_has_no_part_in_are_none(
    ranks, clock, group, sequence
):
    unanswered, (_, other) = ranks
    other.begun(group, "allreduce", sequence, 2.0)
    assert unanswered.find() is None
    clock.now_s += 60.0
    assert unanswered.find() is None
