"""Sensitivity of the first gradient of a model to rounding.

A unit of ReLU whose input is nearly zero switches with the last bits of its input. Where layers
normalise, a single unit may move gradients by some thousandths of their norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from paceline.training.passes import run_passes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.plan.trial import Training
    from paceline.training.strategy import TrainBatch
    from paceline.training.task import Task

# Relative change of the inputs: 16 units of roundoff of fp32. Roundings within the model add up to
# about as much, so that units switch in most batches in which another order of sums may switch one.
_CHANGE = 2.0**-20
_NOISE = 2.0**-13  # share of the whole gradient's norm below which a tensor's gradient is noise


def gradient_sensitivity(
    task: Task, model: nn.Module, batch: TrainBatch, training: Training
) -> float:
    """Return how much the gradient changes with the last bits of the inputs.

    It is the largest change of a tensor, relative to its norm. model: with initial weights, on the
    CPU; its gradients and running statistics are replaced. batch: with floating-point inputs.
    """
    generator = torch.Generator().manual_seed(training.seed)
    noise = torch.randn(batch.inputs.shape, generator=generator)
    changed = replace(batch, inputs=batch.inputs * (1 + _CHANGE * noise))
    plain, other = (_gradients(task, model, each, training) for each in (batch, changed))
    whole = float(torch.stack([tensor.norm() for tensor in plain]).norm())
    if whole == 0:
        return 0.0  # nothing to compare changes with
    return max(
        float((b - a).norm() / (a.norm() + _NOISE * whole))
        for a, b in zip(plain, other, strict=True)
    )


def _gradients(task: Task, model: nn.Module, batch: TrainBatch, training: Training) -> list[Tensor]:
    run_passes(task, model, batch, training)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
