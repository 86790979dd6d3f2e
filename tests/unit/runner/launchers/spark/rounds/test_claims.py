from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.base.errors import EnvironmentLacks, RankFailed
from paceline.plan.trials.trial import Placement
from paceline.runner.launchers.spark.rounds.round_task import Claims


def claims(folder, nodes=1, ranks_per_node=2):
    place = Placement(nodes=nodes, ranks_per_node=ranks_per_node, threads_per_rank=1)
    return Claims(folder / "claims", place)


@pytest.fixture(params=["links", errno.EPERM, errno.EOPNOTSUPP])
def file_system(request, monkeypatch):
    """Have link(2) work, or fail as on a file system without links."""

    def link(_source, _name):
        raise OSError(request.param, os.strerror(request.param))

    if request.param != "links":
        monkeypatch.setattr("os.link", link)


@pytest.mark.usefixtures("file_system")
def test_tasks_that_claim_at_once_get_each_a_rank(tmp_path):
    ours = claims(tmp_path, ranks_per_node=8)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda partition: ours.take(0, partition, 0, None), range(8)))
    assert sorted(found) == list(range(8))
    assert [ours.rank_of(0, partition) for partition in range(8)] == found


@pytest.mark.usefixtures("file_system")
def test_tasks_of_a_host_that_come_at_once_are_on_one_node(tmp_path):
    ours = claims(tmp_path, nodes=2)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ours.node_of, ["beta"] * 8))
    assert len(set(found)) == 1
    assert ours.node_of("alpha") == 1 - found[0]


def test_process_stays_the_rank_that_it_was(tmp_path):
    ours = claims(tmp_path)
    assert ours.take(3, partition=0, node=0, own=1) == 1
    assert ours.take(3, partition=1, node=0, own=0) == 0


def test_process_whose_rank_is_taken_becomes_another(tmp_path):
    ours = claims(tmp_path)
    assert ours.take(3, partition=1, node=0, own=0) == 0
    assert ours.take(3, partition=0, node=0, own=0) == 1


def test_ranks_of_a_host_are_those_of_its_node(tmp_path):
    ours = claims(tmp_path, nodes=2)
    beta, alpha = ours.node_of("beta"), ours.node_of("alpha")
    assert (beta, alpha, ours.node_of("beta")) == (0, 1, 0)
    assert ours.take(0, 0, alpha, None) in (2, 3)
    assert ours.take(0, 1, beta, None) in (0, 1)


def test_more_hosts_than_nodes_are_refused_by_name(tmp_path):
    ours = claims(tmp_path)
    ours.node_of("alpha")
    with pytest.raises(EnvironmentLacks, match=r"Spark placed them on 2 \(alpha, beta\)"):
        ours.node_of("beta")


def test_more_tasks_than_ranks_on_a_node_are_refused_in_the_first_round_only(tmp_path):
    ours = claims(tmp_path, nodes=2, ranks_per_node=1)
    ours.take(0, 0, 0, None)
    with pytest.raises(EnvironmentLacks, match=r"at most 1 rank\(s\) on a node"):
        ours.take(0, 1, 0, None)
    ours.take(1, 0, 0, 0)
    assert ours.take(1, 1, 0, 0) == 1  # that one's executor may be gone


def test_task_that_runs_again_is_refused(tmp_path):
    ours = claims(tmp_path)
    ours.take(2, 1, 0, None)
    with pytest.raises(RankFailed, match="rank 0: Spark runs its task of round 2 a second time"):
        ours.take(2, 1, 0, None)


def test_rounds_that_are_over_leave_nothing(tmp_path):
    ours = claims(tmp_path)
    ours.node_of("alpha")
    ours.take(0, 0, 0, None)
    ours.forget(0)
    assert ours.rank_of(0, 0) is None
    assert [p.name for p in (tmp_path / "claims").iterdir()] == ["node-0"]
    ours.close()
    assert not (tmp_path / "claims").exists()


def test_ranks_that_are_done_are_known_until_the_round_is_over(tmp_path):
    ours = claims(tmp_path)
    ours.take(3, 0, 0, None)
    assert ours.done(3) == set()
    ours.finish(3, 1)
    ours.finish(4, 0)
    assert ours.done(3) == {1}
    ours.forget(3)
    assert (ours.done(3), ours.done(4)) == (set(), {0})
