"""A task of your own: a small convolutional network with AdamW, in one file."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

import paceline


class Options(paceline.TaskOptions):
    """Keys of `options` in the spec."""

    width: int = 8
    weight_decay: float = 0.01


class MyTask(paceline.Task):
    """Classify images; the loss smooths the labels."""

    Options = Options
    accumulation_steps = 2
    clip_norm = 1.0

    def model(self) -> nn.Module:
        """Return a small network as a sequence, so that pipelines can split it."""
        width = self.options.width
        return nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(1),
            nn.Linear(16 * 2 * width, 32, bias=False),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(32, self.settings.classes),
        )

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample."""
        return cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)

    def optimizer(self, parameters: paceline.NamedParameters) -> torch.optim.Optimizer:
        """Return AdamW, without weight decay for biases and norms."""
        decay = {True: self.options.weight_decay, False: 0.0}
        groups = [
            {
                "params": [(n, p) for n, p in parameters if n.endswith("weight") == kind],
                "weight_decay": decay[kind],
            }
            for kind in decay
        ]
        used = [group for group in groups if group["params"]]
        return torch.optim.AdamW(used, lr=self.settings.learning_rate)

    def schedule(self, optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
        """Return a cosine schedule over the whole training."""
        return CosineAnnealingLR(optimizer, T_max=self.settings.steps)
