"""Which rank failed first, and the end that stands for the trial."""

from __future__ import annotations

import dataclasses

import pytest
from tests.support.rows import failure, running_rank

from paceline.measure.records.files import write_json
from paceline.measure.records.rows import TERMINATED
from paceline.runner.job.rank_status import RankEnd, first_failure, outcome_status, trial_end

DONE = RankEnd(rank=0)


def status(rank, state, error=None, *, secondary=False):
    return running_rank(rank, state=state, error=error, secondary=secondary)


def failed_at(rank, unix_s):
    error = dataclasses.replace(failure("ValueError: x", rank), unix_s=unix_s)
    return status(rank, "failed", error)


RUNNING = [status(0, "running"), status(1, "running")]
ON_TWO_HOSTS = [running_rank(rank, host="ab"[rank // 2]) for rank in range(4)]
LOST_PEER = status(0, "failed", "PeerLost: x", secondary=True)
BAD_DATA = status(1, "failed", "DataError: x")
TOO_LATE = status(0, "failed", "TimedOut: x")
ASKED_TO_END = status(0, "failed", TERMINATED, secondary=True)
ENDED_BY_YARN = status(1, "failed", TERMINATED, secondary=True)


@pytest.mark.parametrize(
    ("statuses", "hints", "rank"),
    [
        ([], {}, None),
        ([], {"named": 1}, 1),
        (RUNNING, {}, 0),
        (RUNNING, {"named": 1}, 1),
        (RUNNING, {"dead": (1,)}, 1),
        (RUNNING, {"dead": (0, 1), "named": 1}, 1),
        ([LOST_PEER], {}, None),
        ([LOST_PEER], {"named": 0}, None),
        ([LOST_PEER, status(1, "running")], {}, 1),
        ([LOST_PEER, ENDED_BY_YARN], {}, 1),
        ([LOST_PEER, ENDED_BY_YARN], {"named": 0}, 1),
        ([LOST_PEER, ENDED_BY_YARN, status(2, "running")], {}, 2),
        ([ASKED_TO_END, status(1, "running")], {"named": 0}, 0),
        ([ASKED_TO_END, status(1, "running")], {}, 1),
        ([LOST_PEER, BAD_DATA], {"named": 0, "dead": (0,)}, 1),
        ([TOO_LATE, status(1, "running")], {}, 0),
        ([TOO_LATE, status(1, "running")], {"dead": (1,)}, 1),
        ([TOO_LATE, status(1, "running")], {"named": 1}, 1),
        ([TOO_LATE, BAD_DATA], {}, 1),
        ([status(0, "running"), BAD_DATA], {"dead": (0,)}, 1),
        ([status(0, "failed", "ValueError: x"), BAD_DATA], {"named": 1}, 0),
        ([failed_at(0, 20.0), failed_at(1, 10.0)], {"named": 0}, 1),
        ([failed_at(0, 20.0), failed_at(1, None)], {}, 0),
        ([status(1, "running")], {"named": 0, "dead": (1,)}, 0),
        (ON_TWO_HOSTS, {"named": 0, "dead": (0, 1), "without_peer": (0,)}, 2),
        (ON_TWO_HOSTS, {"named": 0, "dead": (1,), "without_peer": (0,)}, 2),
        (ON_TWO_HOSTS, {"named": 1, "dead": (0, 1), "without_peer": (0,)}, 1),
        (ON_TWO_HOSTS, {"named": 1, "dead": (0, 1), "without_peer": (0, 1)}, 2),
        (ON_TWO_HOSTS, {"named": 3, "without_peer": (0, 3)}, 3),
        (ON_TWO_HOSTS, {"dead": (1,), "without_peer": (2,)}, 1),
        (ON_TWO_HOSTS[:2], {"named": 0, "dead": (0, 1), "without_peer": (0,)}, None),
    ],
)
def test_first_failure(statuses, hints, rank):
    assert first_failure(statuses, **hints).rank == rank


def test_end_has_the_ranks_own_error_or_the_given_reason():
    end = first_failure([LOST_PEER, BAD_DATA]).end("unused")
    assert (end.rank, end.exit_code, str(end.error)) == (1, 4, "DataError: x")
    end = first_failure(RUNNING, dead=(1,)).end("its process was killed")
    assert (end.rank, end.exit_code, str(end.error)) == (1, 5, "RankFailed: its process was killed")


def test_trial_whose_ranks_are_done_ended_well(job):
    assert trial_end(job, [DONE, dataclasses.replace(DONE, rank=1)]) == DONE


def test_trial_ends_as_the_rank_that_failed_first(job):
    lost = RankEnd(rank=0, error=failure("PeerLost: x", 0), secondary=True)
    bad = RankEnd(rank=1, error=failure("DataError: x", 1))
    assert trial_end(job, [lost, bad]) == bad


def test_rank_without_an_end_died(job):
    for row in (LOST_PEER, status(1, "running")):
        write_json(job.files.rank(row.rank).status, row)
    lost = RankEnd(rank=0, error=failure("PeerLost: x", 0), secondary=True)
    end = trial_end(job, [lost, None], "its actor died")
    assert (end.rank, str(end.error)) == (1, "RankFailed: its actor died")


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0, "ok"), (2, "refused"), (3, "refused"), (4, "refused"), (5, "failed"), (6, "timed_out")],
)
def test_outcome_status(code, expected):
    assert outcome_status(code) == expected
