from __future__ import annotations

import pytest
import torch
from tests.support.trials import changed

from paceline.base.errors import EnvironmentLacks
from paceline.train.strategies.reduction.replicate_group import ReplicateGroup, group_by_local_rank

ONE_RANK = {"ranks_per_node": 1, "threads_per_rank": 1}


def test_ranks_in_any_order_are_grouped_by_local_rank():
    places = {0: (1, 0), 1: (0, 1), 2: (1, 1), 3: (0, 0), 4: (2, 1), 5: (2, 0)}
    assert group_by_local_rank(places) == [[3, 0, 5], [1, 2, 4]]


def test_single_node_has_groups_of_one():
    assert group_by_local_rank({0: (0, 0), 1: (0, 1)}) == [[0], [1]]


def test_nodes_with_different_numbers_of_ranks_are_refused():
    with pytest.raises(EnvironmentLacks, match=r"2 ranks .* node 1 has no local rank 1"):
        group_by_local_rank({0: (0, 0), 1: (0, 1), 2: (1, 0)})


def test_compressed_tensors_come_back_to_their_own_places(group_of_one, make_trial):
    trial = changed(
        make_trial(), transport="gloo", placement={**ONE_RANK, "nodes": 2},
        compression={"method": "bf16"}, bucket_mb=40 / 2**20,
    )  # fmt: skip
    group = ReplicateGroup(trial)
    for step in range(2):
        given = [torch.linspace(step, size, size) for size in (4, 6, 5)]  # two buckets
        found = [tensor.clone() for tensor in given]
        group.all_reduce(found, [(4,), (2, 3), (5,)])
        assert all(map(torch.equal, found, [each.bfloat16().float() for each in given]))
    assert group.describe()["bucket_bytes"] == [16, 24, 20]
    group.close(failed=False)
