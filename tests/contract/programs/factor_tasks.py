"""Tasks whose linear layers have sufficient factors; tests/contract/test_factors.py trains them."""

from __future__ import annotations

from torch import nn

from paceline.training.task import Task

CLASSES = 3
CLIP_NORM = 0.05  # below the norm of every gradient of these trainings


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


class Linear(Task):
    """No layer whose gradient is summed."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, CLASSES))
