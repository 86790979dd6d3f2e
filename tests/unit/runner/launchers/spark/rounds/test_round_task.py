"""A task that cannot become a rank reports its own error, without Spark."""

from __future__ import annotations

import pytest

from paceline.runner.launchers.spark.barrier import BarrierTaskFailed, failed_stage
from paceline.runner.launchers.spark.rounds import round_task as task
from paceline.runner.launchers.spark.rounds.round_task import Claims, run_round_task
from paceline.train.rank.round_exchange import Orders


@pytest.fixture
def job(make_job, monkeypatch):
    monkeypatch.setattr(task, "die_with_parent", lambda _parent: None)  # the parent is pytest's
    return make_job(transport="spark-rounds", launcher="spark")


def end_of_task(job, partition):
    with pytest.raises(BarrierTaskFailed) as caught:
        run_round_task(job, partition, Orders(number=0), lambda: None)
    return failed_stage(job, f"BarrierTaskFailed: {caught.value}\n")


def test_run_directory_that_is_not_shared_is_an_error_of_this_task(job):
    end = end_of_task(job, 1)
    assert (end.rank, end.exit_code) == (1, 3)
    assert "storage that all nodes share" in str(end.error)


def test_task_without_a_rank_says_so(job):
    job.files.root.mkdir(parents=True)
    job.files.trial.touch()
    claims = Claims(job.files.claims, job.trial.placement)
    for partition in (0, 1):
        claims.take(0, partition, 0, None)
    end = end_of_task(job, 2)
    assert (end.rank, end.exit_code) == (2, 3)
    assert "expected at most 2 rank(s) on a node" in str(end.error)


def test_task_that_runs_again_blames_the_rank_that_it_was(job):
    job.files.root.mkdir(parents=True)
    job.files.trial.touch()
    rank = Claims(job.files.claims, job.trial.placement).take(0, 1, 0, None)
    end = end_of_task(job, 1)
    assert (end.rank, end.exit_code) == (rank, 5)
    assert "a second time" in str(end.error)
