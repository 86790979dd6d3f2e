"""Placement of workers, and the share of a batch that each has."""

from __future__ import annotations

import pytest

from paceline.spec.placement import Placement


@pytest.mark.parametrize(("samples", "share"), [(1, 1), (3, 1), (10, 4), (12, 4)])
def test_samples_of_a_replica_are_rounded_up(samples: int, share: int) -> None:
    placement = Placement(nodes=3, ranks_per_node=1, threads_per_rank=1)
    assert placement.samples_of_a_replica(samples) == share
