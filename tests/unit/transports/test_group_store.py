from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from paceline.errors import TimedOut
from paceline.node.memory import gather
from paceline.transports.store import GroupStore


def test_value_published_by_one_rank_is_seen_by_another():
    store = dist.HashStore()
    one, two = (GroupStore(store, r, 2) for r in range(2))
    one.publish("memory", "here")
    assert two.lookup("memory", 1.0) == "here"
    assert (two.local_rank, two.ranks_on_node) == (1, 2)


def test_purposes_are_kept_apart():
    store = dist.HashStore()
    GroupStore(store, 0, 1, "photos").publish("memory", "here")
    with pytest.raises(TimedOut, match="rank 0 of other: 'memory'"):
        GroupStore(store, 0, 1, "other").lookup("memory", 0.1)


def test_barriers_can_be_used_again_and_name_who_is_absent():
    store = dist.HashStore()
    ranks = [GroupStore(store, r, 2) for r in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            list(pool.map(lambda rank: rank.barrier(10.0), ranks))
    with pytest.raises(TimedOut, match=r"ranks \[1\]"):
        ranks[0].barrier(0.1)


def test_values_of_all_ranks_are_gathered_in_their_order():
    store = dist.HashStore()
    ranks = [GroupStore(store, r, 3, "hosts") for r in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda rank: gather(rank, f"host{rank.local_rank}", 10.0), ranks))
    assert found == [["host0", "host1", "host2"]] * 3
