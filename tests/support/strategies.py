"""Make strategies and their batches in tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paceline.plan.trials.trial import RankContext, Trial
from paceline.train.strategies import LocalStrategy, create_strategy
from paceline.train.training.strategy import TrainBatch
from paceline.train.workloads.build import build_model, task_of


def prepared(trial: Trial, context: RankContext, peers: Any = None) -> LocalStrategy:
    """Return the strategy of a trial with its first model."""
    strategy, task = create_strategy(trial), task_of(trial.training, classes=3)
    strategy.prepare(task, build_model(task), context, trial, peers)
    return strategy


def train_batch(samples: int, **others: Any) -> TrainBatch:
    """Return a global batch of random images of 3 classes; others: fields with other values."""
    generator = torch.Generator().manual_seed(others.get("step", 0))
    usual = {
        "step": 0, "epoch": 0, "inputs": torch.randn(samples, 3, 32, 32, generator=generator),
        "targets": torch.arange(samples) % 3, "sample_ids": np.arange(samples),
        "global_samples": samples,
    }  # fmt: skip
    return TrainBatch(**{**usual, **others})
