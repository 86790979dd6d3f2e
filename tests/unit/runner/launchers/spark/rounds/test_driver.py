"""The driver of rounds, with tasks that are made up."""

from __future__ import annotations

import dataclasses
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from tests.support.rows import STEP, failure, write_status

from paceline.runner.job.rank_status import RankEnd
from paceline.runner.launchers.spark.barrier import task_failed
from paceline.runner.launchers.spark.rounds import driver
from paceline.runner.launchers.spark.rounds.driver import RoundFailed, failed_round, run_rounds
from paceline.runner.launchers.spark.rounds.round_task import Claims, Executors
from paceline.train.rank.round_exchange import Carry, RankReport, Report

ROUNDS = 3
STEPS = 5  # in rounds of 2, 2 and 1


def carry(host="h"):
    return Carry(host=host, process_started_unix_s=0, train_started_unix_s=0, last_step=STEP)


class Tasks:
    """What two tasks say in each round; `seen` are the orders, and the weights that came along."""

    def __init__(self, **changes):
        self.seen = []
        self._changes = changes

    def __call__(self, orders, state):
        self.seen.append((orders, None if state is None else state.tolist()))
        return Report(
            ranks={rank: self._told(rank, orders) for rank in (0, 1)},
            total=None if orders.finish else np.full(2, orders.number, np.float32),
        )

    def _told(self, rank, orders):
        told = RankReport(
            host="h",
            cores=json.dumps({"affinity": [rank], "quotas": {}}),
            carry=None if orders.finish else carry(),
            next_step=min(2 * (orders.number + 1), STEPS),
            steps=STEPS,
        )
        return dataclasses.replace(told, **self._changes.get(f"rank{rank}", {}))


def run(job, tasks):
    return run_rounds(job, tasks, lambda: None)


@pytest.fixture
def job(make_job):
    return make_job(transport="spark-rounds", launcher="spark")


def test_rounds_go_on_until_all_steps_are_done(job):
    tasks = Tasks()
    assert run(job, tasks) == RankEnd(rank=0)
    orders = [given for given, _ in tasks.seen]
    assert [o.number for o in orders] == [0, 1, 2, 3]
    assert [o.finish for o in orders] == [False, False, False, True]
    assert [sorted(o.carries) for o in orders] == [[], [0, 1], [0, 1], [0, 1]]
    # what the last round came to goes out with the next
    assert [state for _, state in tasks.seen] == [None, [0, 0], [1, 1], [2, 2]]
    assert orders[-1].facts == {"rounds": ROUNDS, "moved_ranks": 0}


def test_ranks_that_changed_their_process_are_counted(job):
    tasks = Tasks(rank1={"moved": True})
    run(job, tasks)
    assert tasks.seen[-1][0].facts["moved_ranks"] == ROUNDS


def test_claims_are_gone_at_the_end(job):
    Claims(job.files.claims, job.trial.placement).take(9, 0, 0, None)
    run(job, Tasks())
    assert not job.files.claims.exists()


def test_ranks_that_share_a_core_are_refused(job):
    end = run(job, Tasks(rank1={"cores": json.dumps({"affinity": [0], "quotas": {}})}))
    assert end.exit_code == 3
    assert "share cores 0" in str(end.error)


def test_clocks_of_other_hosts_are_bounded_by_what_the_driver_saw(job, monkeypatch):
    # The driver's clock: a round takes from 10 to 14, from 20 to 24, ...
    ticks = iter([n for k in range(1, 9) for n in (10.0 * k, 10.0 * k + 4)])
    monkeypatch.setattr(driver, "time", SimpleNamespace(time=ticks.__next__))

    class Timed(Tasks):
        def _told(self, rank, orders):
            began = 10.0 * (orders.number + 1)
            own = (began + 1, began + 4) if rank == 0 else (began - 99, began - 97)
            told = super()._told(rank, orders)
            return dataclasses.replace(told, host="ab"[rank], task_unix_s=own)

    tasks = Timed()
    job = dataclasses.replace(job, trial=job.trial.model_copy(
        update={"placement": job.trial.placement.model_copy(
            update={"nodes": 2, "ranks_per_node": 1})}))  # fmt: skip
    run(job, tasks)
    clocks = tasks.seen[-1][0].clocks
    assert (clocks[0].offset_s, clocks[0].error_s) == (0.0, 0.0)
    # rank 0's clock is the driver's less 0 to 1 s; rank 1's is 99 to 101 s behind the driver's
    assert clocks[1].offset_s == pytest.approx(100 - -0.5)
    assert clocks[1].error_s == pytest.approx(1 + 0.5)


def lost(partition, why="Python worker exited unexpectedly (crashed)"):
    return (
        f"Job aborted due to stage failure: Task {partition} in stage 4.0 failed 1 times, most "
        f"recent failure: Lost task {partition}.0 in stage 4.0 (TID 9) (localhost executor "
        f"driver): org.apache.spark.SparkException: {why}\n\tat org.apache.spark.X"
    )


def failing(message):
    def run_round(orders, _state):
        raise RoundFailed(message)

    return run_round


def test_killed_worker_is_named_by_the_rank_that_it_claimed(job):
    Claims(job.files.claims, job.trial.placement).take(0, 0, 0, own=1)
    end = run(job, failing(lost(0)))
    assert (end.rank, end.exit_code) == (1, 5)
    assert str(end.error).startswith(
        "RankFailed: its Python worker or executor was killed or crashed"
    )


LOST_EXECUTOR = (
    "Task 1 in stage 2.0 failed 1 times, most recent failure: Lost task 1.0 in stage 2.0 "
    "(TID 3) (10.0.0.2 executor 1): ExecutorLostFailure (executor 1 exited) Reason: Executor "
    "heartbeat timed out after 126 ms\nDriver stacktrace:"
)


def test_executor_lost_in_its_first_round_says_sparks_reason(job):
    end = failed_round(job, 0, LOST_EXECUTOR, Executors())
    assert (end.rank, end.exit_code) == (1, 5)
    assert "on host 10.0.0.2, and rank 1 with it: Executor heartbeat timed out" in str(end.error)


def test_what_a_task_said_itself_outweighs_sparks_words(job):
    write_status(job.files, 1, "failed", "DataError: bad")
    end = run(job, failing(lost(0)))
    assert (end.rank, end.exit_code, str(end.error)) == (1, 4, "DataError: bad")


def test_end_that_a_task_told_through_spark_is_its_end(job):
    end = RankEnd(rank=1, error=failure("RankFailed: the loss of step 3 is nan", 1))
    raised = task_failed(job, end)
    assert run(job, failing(f"x\npaceline.job.barrier.BarrierTaskFailed: {raised}\n\tat")) == end


def test_rounds_by_hand_end_at_their_limit(make_job):
    job = make_job(transport="spark-rounds", trial_s=0.2, launcher="spark")
    cancelled = threading.Event()

    def run_round(orders, _state):
        assert cancelled.wait(10)
        raise RoundFailed("Job 3 cancelled")

    end = run_rounds(job, run_round, cancelled.set)
    assert end.exit_code == 6
    assert "limit of 0.2 s" in str(end.error)


def test_executor_lost_in_a_round_is_told_with_all_its_ranks(job):
    rank = RankReport(host="beta", cores="{}", executor="1", next_step=0, steps=1)
    executors = Executors(lambda: {"1"})
    executors.saw({0: rank, 1: rank})
    end = failed_round(job, 4, LOST_EXECUTOR, executors)
    assert (end.rank, end.exit_code) == (0, 5)
    assert "executor 1 on host beta, and ranks 0, 1 with it: Executor heartbeat" in str(end.error)


def test_results_that_a_lost_executor_took_with_it_blame_its_ranks(job):
    rank = RankReport(host="beta", cores="{}", executor="1", next_step=0, steps=1)
    executors = Executors(lambda: {"0"})
    executors.saw({1: rank})
    message = "Lost task 1.0 in stage 2.0 (TID 3) (10.0.0.2 executor 1): TaskResultLost (result"
    end = failed_round(job, 4, message, executors)
    assert (end.rank, end.exit_code) == (1, 5)
    assert "executor 1 on host beta, and rank 1 with it" in str(end.error)


def test_executor_lost_between_two_rounds_ends_the_trial(job):
    alive = {"7"}
    tasks = Tasks(rank0={"executor": "7"}, rank1={"executor": "7"})

    def run_round(orders, state):
        if orders.number == 1:
            alive.clear()
        return tasks(orders, state)

    end = run_rounds(job, run_round, lambda: None, lambda: alive)
    assert [orders.number for orders, _ in tasks.seen] == [0, 1]
    assert (end.rank, end.exit_code) == (0, 5)
    assert "executor 7 on host h, and ranks 0, 1 with it" in str(end.error)
