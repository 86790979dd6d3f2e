from __future__ import annotations

import pytest
from tests.support.trials import changed, placement


@pytest.fixture
def make_strategy_trial(make_trial):
    """A tiny trial of a strategy; `dropout` and the like override its training."""

    def make(strategy, replicas, *, oversubscribe=True, **training):
        base = make_trial(**{"dropout": False, "global_batch": 12, **training})
        place = placement(1, replicas, replicas_per_node=replicas, oversubscribe=oversubscribe)
        return changed(base, local_strategy=strategy, placement=place)

    return make
