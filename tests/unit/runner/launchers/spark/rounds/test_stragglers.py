"""A round in which some ranks are done and the others do not end."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from tests.support.rows import write_status

from paceline.runner.launchers.spark.rounds import round_task as module
from paceline.runner.launchers.spark.rounds.driver import RoundFailed, run_rounds
from paceline.runner.launchers.spark.rounds.round_task import Claims, Executors, Stragglers
from paceline.train.rank.round_exchange import RankReport


@pytest.fixture
def job(make_job, monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    monkeypatch.setattr(module, "heartbeat_s", lambda _trial: 0)
    limits = {"collective_s": 0.2, "rendezvous_s": 0.2}
    made = make_job(transport="spark-rounds", launcher="spark", **limits)
    write_status(made.files, 1, host="beta")
    return made


def report(rank):
    return RankReport(
        host=f"host-{rank}", cores="", executor=str(7 + rank), carry=None, next_step=0, steps=1
    )


def claims_of(job):
    return Claims(job.files.claims, job.trial.placement)


def test_rank_that_does_not_end_a_round_is_named_with_its_host(job):
    cancelled = threading.Event()

    def run_round(orders, _state):
        claims_of(job).finish(orders.number, 0)
        assert cancelled.wait(10)
        raise RoundFailed("Job 3 cancelled")

    end = run_rounds(job, run_round, cancelled.set)
    assert (end.rank, end.exit_code) == (1, 6)
    assert str(end.error).startswith("TimedOut: round 0: rank 1 (beta) did not end it within 0.2 s")


def test_rank_that_trains_in_the_first_round_is_not_given_time_to_start(job):
    limits = job.trial.limits.model_copy(update={"rendezvous_s": 60.0})
    patient = dataclasses.replace(job, trial=job.trial.model_copy(update={"limits": limits}))
    job.files.rank(1).steps.write_text("{}\n")
    cancelled = threading.Event()
    with Stragglers(patient, claims_of(job), Executors(), cancelled.set).limited(0):
        claims_of(job).finish(0, 0)
        assert cancelled.wait(10)


def test_round_that_nobody_has_done_is_not_limited(job):
    ours = Stragglers(job, claims_of(job), Executors(), lambda: pytest.fail("cancelled"))
    with ours.limited(3):
        threading.Event().wait(0.4)
    assert ours.end is None


def end_of_unsent_results(job, executors):
    claims, cancelled = claims_of(job), threading.Event()
    ours = Stragglers(job, claims, executors, cancelled.set)
    with ours.limited(3):
        for rank in (0, 1):
            claims.finish(3, rank)
        assert cancelled.wait(10)
    assert ours.end is not None
    return ours.end


def test_results_that_do_not_reach_the_driver_end_the_round(job):
    end = end_of_unsent_results(job, Executors())
    assert end.exit_code == 6
    assert "one of rank 0 (not seen yet), rank 1 (beta) hangs" in str(end.error)


def test_host_that_is_lost_while_its_results_travel_is_named(job):
    executors = Executors(lambda: {"7"})
    executors.saw({rank: report(rank) for rank in (0, 1)})
    end = end_of_unsent_results(job, executors)
    assert (end.rank, end.exit_code) == (1, 5)
    assert "Spark lost executor 8 on host host-1, and rank 1 with it" in str(end.error)
