from __future__ import annotations

import pytest

from paceline.plan.costs import ALL_REDUCE, CollectiveCost, all_gather, all_reduce


@pytest.mark.parametrize(
    ("algorithm", "ranks", "rounds", "path", "messages", "volumes"),
    [
        ("ring", 2, 2, 1.0, 4, 2),
        ("ring", 4, 6, 1.5, 24, 6),
        ("recursive-doubling", 2, 1, 1.0, 2, 2),
        ("recursive-doubling", 4, 2, 2.0, 8, 8),
        ("recursive-doubling", 5, 4, 4.0, 10, 10),  # a fold before and after the two stages
        ("rabenseifner", 4, 4, 1.5, 16, 6),
        ("rabenseifner", 5, 6, 3.5, 18, 8),
        ("naive", 4, 1, 3.0, 12, 12),
        ("parameter-server", 4, 2, 6.0, 6, 6),
    ],
)
def test_cost_of_an_all_reduce(algorithm, ranks, rounds, path, messages, volumes):
    assert all_reduce(algorithm, ranks) == CollectiveCost(
        rounds=rounds, path=path, messages=messages, volumes=volumes
    )


def test_a_ring_of_25_mb_over_1_gbit_takes_the_time_of_the_wire():
    # 2 hosts: every byte crosses each direction once, 8 x 25e6 / 1e9 = 0.2 s, and 2 rounds
    seconds = all_reduce("ring", 2).seconds(25e6, 50e-6, 125e6)
    assert seconds == pytest.approx(0.2 + 100e-6)


def test_an_all_gather_receives_every_other_ranks_tensor():
    assert all_gather(4).seconds(1e6, 0.0, 1e8) == pytest.approx(0.03)


@pytest.mark.parametrize("algorithm", ALL_REDUCE)
def test_one_rank_sends_nothing(algorithm):
    assert all_reduce(algorithm, 1).seconds(1e9, 1.0, 1.0) == 0
