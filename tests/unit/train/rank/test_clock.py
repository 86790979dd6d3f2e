from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from paceline.base.errors import TimedOut
from paceline.base.host.machine import best_offset
from paceline.train.rank.peers import measure_offset


def test_offset_comes_from_the_round_with_the_shortest_trip():
    rounds = [(10.0, 15.9, 12.0), (20.0, 25.1, 20.2), (30.0, 36.0, 31.0)]
    offset_s, error_s = best_offset(rounds)
    assert offset_s == pytest.approx(5.0)
    assert error_s == pytest.approx(0.1)


def test_ranks_on_another_host_learn_how_far_their_clock_is_off(context_of):
    store = dist.HashStore()
    hosts = ["alpha", "alpha", "beta", "beta"]

    def run(rank):
        ahead_s = 100.0 if hosts[rank] == "beta" else 0.0
        context = context_of(rank=rank, world_size=4, host=hosts[rank])
        return measure_offset(store, context, hosts, 10.0, lambda: time.time() + ahead_s)

    with ThreadPoolExecutor(4) as pool:
        offsets = list(pool.map(run, range(4)))
    assert offsets[0] == offsets[1] == (0.0, 0.0)
    for offset_s, error_s in offsets[2:]:
        assert abs(offset_s + 100.0) <= error_s
        assert 0 < error_s < 1


def test_missing_rank_is_a_time_out(context_of):
    context = context_of(rank=1, world_size=2)
    with pytest.raises(TimedOut, match=r"0\.2 s"):
        measure_offset(dist.HashStore(), context, ["beta", context.host], 0.2)
