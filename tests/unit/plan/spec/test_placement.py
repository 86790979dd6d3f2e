"""Placement of workers, the cores that they have, and the share of a batch that each has."""

from __future__ import annotations

import pytest

from paceline.plan.spec.placement import Placement, divisors


@pytest.mark.parametrize(("samples", "share"), [(1, 1), (3, 1), (10, 4), (12, 4)])
def test_samples_of_a_replica_are_rounded_up(samples: int, share: int) -> None:
    placement = Placement(nodes=3, ranks_per_node=1, threads_per_rank=1)
    assert placement.samples_of_a_replica(samples) == share


@pytest.mark.parametrize(
    ("ranks", "replicas", "stages", "allocated", "replicas_of_a_rank", "threads", "cores"),
    [(1, 3, 1, None, 3, 2, 12), (4, 2, 2, None, 1, 6, 48), (3, 1, 3, 5, 1, 6, 10)],
)
def test_workers_divide_the_threads_of_their_rank(
    ranks, replicas, stages, allocated, replicas_of_a_rank, threads, cores
):
    placement = Placement(
        nodes=2, ranks_per_node=ranks, threads_per_rank=6, replicas_per_node=replicas,
        stages=stages, allocated_cores=allocated,
    )  # fmt: skip
    found = (placement.replicas_per_rank, placement.threads_per_worker, placement.cores)
    assert found == (replicas_of_a_rank, threads, cores)


def test_numbers_of_workers_with_equally_many_cores() -> None:
    assert divisors(12) == [2, 3, 4, 6, 12]
    assert divisors(1) == []
