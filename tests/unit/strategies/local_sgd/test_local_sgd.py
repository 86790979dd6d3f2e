"""Local SGD of a single rank; with peers see tests/contract/test_compression.py."""

from __future__ import annotations

import numpy as np
import torch
from tests.trials import changed

from paceline.strategies import TrainBatch, create_strategy
from paceline.workloads.build import build_model, make_task, task_of


def test_rank_without_peers_trains_as_a_sequential_one(make_trial, solo):
    batch = TrainBatch(
        step=0, epoch=0, inputs=torch.randn(4, 3, 32, 32), targets=torch.arange(4) % 3,
        sample_ids=np.arange(4), global_samples=4, is_last=True,
    )  # fmt: skip
    weights = []
    for averaging in (None, {"period_steps": 2}):
        trial = changed(make_trial(), local_strategy="processes", averaging=averaging)
        strategy = create_strategy(trial)
        model = build_model(make_task("tiny", classes=3, dropout=False, seed=3))
        strategy.prepare(task_of(trial.training, classes=3), model, solo, trial, None)
        result = strategy.gradient(batch)
        assert result.comm_s is None
        assert strategy.step() is None
        weights.append(strategy.state_dict())
        strategy.close(failed=False)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
