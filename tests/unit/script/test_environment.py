"""A script finds the variables that torchrun sets (torch/distributed/run.py)."""

from __future__ import annotations

from paceline.plan.rank_context import RankContext, StoreAddress
from paceline.script.environment import torchrun_variables


class _Trial:
    id = "train.mpi.gloo"

    class placement:  # noqa: N801
        nodes = 2


def context(**values: object) -> RankContext:
    usual: dict = {
        "rank": 3, "world_size": 4, "local_rank": 1, "ranks_on_node": 2, "node_index": 1,
        "host": "b", "process_started_unix_s": 0.0,
    }  # fmt: skip
    return RankContext(**{**usual, **values})


def test_a_rank_of_several_uses_the_store_of_rank_0():
    address = StoreAddress(host="10.0.0.1", port=4711)
    found = torchrun_variables(_Trial(), context(store=address))
    assert found == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711",
        "TORCHELASTIC_RUN_ID": "train.mpi.gloo", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def test_a_single_rank_has_no_store():
    found = torchrun_variables(_Trial(), context(rank=0, world_size=1))
    assert (found["MASTER_PORT"], found["TORCHELASTIC_USE_AGENT_STORE"]) == ("0", "False")
