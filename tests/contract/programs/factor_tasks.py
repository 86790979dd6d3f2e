"""Tasks whose linear layers have sufficient factors, for test_factors.py and test_zero.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.train.training.task import Task

CLASSES = 3
CLIP_NORM = 0.05  # below the norm of every gradient of these trainings
ADAPTIVE_RATE = 0.001


class Convolutional(Task):
    """A convolution, whose gradient is summed, and two linear layers."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 4, 5, 4), nn.ReLU(), nn.Flatten(),
            nn.Linear(4 * 7 * 7, 32), nn.ReLU(), nn.Linear(32, CLASSES, bias=False),
        )  # fmt: skip


class Accumulated(Convolutional):
    """The samples of a step in three passes, with clipping by the global norm."""

    accumulation_steps = 3
    clip_norm = CLIP_NORM


class Adaptive(Convolutional):
    """A state of two moments and a counter, without state before the first step."""

    def optimizer(self, parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=ADAPTIVE_RATE)


class Indices(nn.Module):
    """Make indices below 50 from the first values of a sample."""

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.flatten(1)[:, :12].abs() * 10).long().clamp(max=49)


class Embedded(Task):
    """An embedding, of which row 3 is not trained, and sequences of linear layers."""

    accumulation_steps = 2

    def model(self) -> nn.Module:
        return nn.Sequential(
            Indices(), nn.Embedding(50, 8, padding_idx=3), nn.Linear(8, 4), nn.Flatten(),
            nn.Linear(48, CLASSES),
        )  # fmt: skip


class Linear(Task):
    """No layer whose gradient is summed."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, CLASSES))
