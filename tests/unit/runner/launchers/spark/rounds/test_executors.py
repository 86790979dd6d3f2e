"""Which ranks were in an executor that Spark has lost."""

from __future__ import annotations

import pytest

from paceline.runner.launchers.spark.rounds import round_task as module
from paceline.runner.launchers.spark.rounds.round_task import ExecutorPlace, Executors, own_executor
from paceline.train.rank.round_exchange import RankReport


def reports(**executors):
    """rank0="7" is a task of rank 0 in executor 7, on host-7."""
    return {
        int(rank.removeprefix("rank")): RankReport(
            host=f"host-{name}", cores="{}", executor=name, next_step=0, steps=1
        )
        for rank, name in executors.items()
    }


def test_lost_executor_is_told_with_its_host_and_all_its_ranks():
    alive = {"0", "1"}
    ours = Executors(lambda: alive)
    ours.saw(reports(rank0="0", rank1="0", rank2="1", rank3="1"))
    assert ours.lost() is None
    alive.discard("1")
    error = ours.lost()
    assert error is not None
    assert "executor 1 on host host-1, and ranks 2, 3 with it" in str(error)
    assert error.rank == 2


def test_ranks_that_went_on_elsewhere_do_not_hide_the_loss():
    ours = Executors(lambda: {"0", "2"})  # 2 is what Spark has started in place of 1
    ours.saw(reports(rank0="0", rank1="1"))
    ours.saw(reports(rank0="0", rank1="0"))
    assert "executor 1 on host host-1, and rank 1 with it" in str(ours.lost())


def test_with_a_local_master_there_is_nothing_to_lose():
    ours = Executors()
    ours.saw({0: RankReport(host="h", cores="{}", next_step=0, steps=1)})
    assert ours.lost() is None
    assert ours.place("driver") is None


def test_place_is_that_of_the_last_round():
    ours = Executors(set)
    ours.saw(reports(rank0="0", rank1="0"))
    ours.saw(reports(rank1="0"))
    assert ours.place("0") == ExecutorPlace("host-0", (1,))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["java", "x.CoarseGrainedExecutorBackend", "--executor-id", "12", "--cores", "2"], "12"),
        (["java", "org.apache.spark.deploy.SparkSubmit", "train.py"], None),
        (["java", "--executor-id"], None),
        ([], None),
    ],
)
def test_executor_is_known_by_its_command_line(words, name, monkeypatch):
    monkeypatch.setattr(module, "executor_pid", lambda: 4711)
    monkeypatch.setattr(module, "command_line_of", {4711: words}.get)
    assert own_executor() == name
