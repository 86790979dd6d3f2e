from __future__ import annotations

import pytest

from paceline.plan.trial import Placement, Training, Trial
from paceline.train.context import RankContext


@pytest.fixture
def make_trial():
    """Makes a tiny trial of one rank; keywords override its training or its placement."""

    def make(ranks=1, oversubscribe=True, **training):
        values = {
            "workload": "tiny", "model": "tiny-alexnet", "dataset": "none", "trust_dataset": False,
            "seed": 3, "image_size": 32, "global_batch": 8, "epochs": 1, "max_steps": None,
            "warmup_steps": 0, "learning_rate": 0.01, "momentum": 0.9, "dropout": True,
            "reading": "memory", "precision": "fp32", "memory_format": "contiguous",
        }  # fmt: skip
        return Trial(
            id="t",
            experiment="unit",
            repeat=0,
            launcher="local",
            transport="none" if ranks == 1 else "gloo",
            local_strategy="sequential",
            placement=Placement(
                nodes=1, ranks_per_node=ranks, threads_per_rank=1, oversubscribe=oversubscribe
            ),
            training=Training(**{**values, **training}),
        )

    return make


@pytest.fixture
def solo():
    return make_context()


@pytest.fixture
def context_of():
    return make_context


def make_context(rank=0, world_size=1, host="alpha", store=None):
    return RankContext(
        rank=rank, world_size=world_size, local_rank=rank, ranks_on_node=world_size, node_index=0,
        host=host, process_started_unix_s=1000.0, store=store,
    )  # fmt: skip
