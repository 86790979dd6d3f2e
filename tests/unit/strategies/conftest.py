from __future__ import annotations

import pytest

from paceline.plan.trial import Trial


@pytest.fixture
def make_strategy_trial(make_trial):
    """A tiny trial of a strategy; `dropout` and the like override its training."""

    def make(strategy, replicas, *, oversubscribe=True, **training):
        base = make_trial(
            oversubscribe=oversubscribe, **{"dropout": False, "global_batch": 12, **training}
        )
        rows = base.model_dump() | {
            "local_strategy": strategy,
            "strategy_options": {},
            "placement": base.placement.model_dump()
            | {"threads_per_rank": replicas, "replicas_per_node": replicas},
        }
        return Trial.model_validate(rows)

    return make
