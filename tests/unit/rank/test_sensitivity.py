"""A unit of ReLU at its threshold makes a gradient sensitive; a smooth function does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.strategies.own_training import trial_of
from tests.unit.strategies.pipeline.node import task_for
from torch import nn

from paceline.rank.result import gradient_sensitivity
from paceline.training.strategy import TrainBatch

SAMPLES = 8


class Units(nn.Module):
    """Scores from `activation(weight x input - threshold)`: just above zero for inputs of one."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.activation(self.weight * inputs - (1 - 2.0**-22))


@pytest.mark.parametrize(
    ("activation", "low", "high"), [(nn.ReLU(), 0.05, 10), (nn.Softplus(), 0, 1e-4)]
)
def test_only_units_at_their_threshold_are_sensitive(
    activation: nn.Module, low: float, high: float
) -> None:
    trial = trial_of(strategy="sequential")
    batch = TrainBatch(
        step=0,
        epoch=0,
        inputs=torch.ones(SAMPLES, 3),
        targets=torch.arange(SAMPLES) % 3,
        sample_ids=np.arange(SAMPLES),
        global_samples=SAMPLES,
        is_last=False,
    )
    found = [
        gradient_sensitivity(task_for(trial), Units(activation), batch, trial.training)
        for _ in range(2)
    ]
    assert low < found[0] < high
    assert found[0] == found[1]
