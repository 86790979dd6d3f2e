"""The place of a rank, from the host of every rank."""

import os

import pytest

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.processes import process_started_unix_s
from paceline.plan.trials.trial import StoreAddress
from paceline.runner.job.context import nodes_of, rank_context

ADDRESS = StoreAddress(host="10.0.0.1", port=4444, secret="")


@pytest.mark.parametrize(
    ("rank", "local_rank", "node_index"), [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
)
def test_scattered_ranks_are_numbered_on_their_nodes(rank, local_rank, node_index):
    context = rank_context(rank, ["a", "b", "a", "b"], ADDRESS)
    assert (context.rank, context.world_size, context.ranks_on_node) == (rank, 4, 2)
    assert (context.local_rank, context.node_index) == (local_rank, node_index)
    assert context.host == "ab"[node_index]
    assert context.store == ADDRESS


def test_uneven_nodes_are_refused():
    assert nodes_of(["b", "a", "a", "b"], "use two") == ["b", "a"]
    with pytest.raises(EnvironmentLacks, match="a: 2, b: 1; use two"):
        nodes_of(["a", "b", "a"], "use two")


def test_single_rank_has_no_store():
    assert rank_context(0, ["a"], ADDRESS).store is None


def test_context_has_the_start_of_its_process():
    started = rank_context(0, ["a"], None).process_started_unix_s
    assert started == pytest.approx(process_started_unix_s(os.getpid()), abs=0.1)
