from __future__ import annotations

import pytest
import torch.distributed as dist
from tests.support.trials import changed, placement


@pytest.fixture
def make_strategy_trial(make_trial):
    """A tiny trial of a strategy; `dropout` and the like override its training."""

    def make(strategy, replicas, *, oversubscribe=True, **training):
        base = make_trial(**{"dropout": False, "global_batch": 12, **training})
        place = placement(1, replicas, replicas_per_node=replicas, oversubscribe=oversubscribe)
        return changed(base, local_strategy=strategy, placement=place)

    return make


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
