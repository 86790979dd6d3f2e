from __future__ import annotations

import pytest

from paceline.errors import EnvironmentLacks
from paceline.strategies.reduction.replicate_group import group_by_local_rank


def test_ranks_in_any_order_are_grouped_by_local_rank():
    places = {0: (1, 0), 1: (0, 1), 2: (1, 1), 3: (0, 0), 4: (2, 1), 5: (2, 0)}
    assert group_by_local_rank(places) == [[3, 0, 5], [1, 2, 4]]


def test_single_node_has_groups_of_one():
    assert group_by_local_rank({0: (0, 0), 1: (0, 1)}) == [[0], [1]]


def test_nodes_with_different_numbers_of_ranks_are_refused():
    with pytest.raises(EnvironmentLacks, match=r"2 ranks .* node 1 has no local rank 1"):
        group_by_local_rank({0: (0, 0), 1: (0, 1), 2: (1, 0)})
