"""The loss: the sum of the samples' losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.errors import UsageError
from paceline.training.batch_norm import placeholders
from paceline.training.dropout import set_sample_keys
from paceline.training.precision import autocast

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.plan.trial import Training
    from paceline.training.strategy import TrainBatch
    from paceline.training.task import Task


def sum_of_losses(task: Task, model: nn.Module, batch: TrainBatch, training: Training) -> Tensor:
    """Run the forward pass; return the sum of losses: a scalar with a graph, on the device of the
    tensors.

    An empty batch is replaced by one sample with weight 0, so its gradients are all 0.
    """
    inputs, targets, ids = batch.inputs, batch.targets, batch.sample_ids
    weight = 1.0
    if len(ids) == 0:
        inputs = inputs.new_zeros((1, *inputs.shape[1:]))
        targets = targets.new_zeros((1, *targets.shape[1:]))
        ids, weight = np.zeros(1, dtype=np.int64), 0.0
    set_sample_keys(model, training.seed, batch.epoch, ids)
    if weight == 1.0:
        with autocast(training, inputs.device.type):
            return summed_loss(task, model(inputs), targets)
    with placeholders(model), autocast(training, inputs.device.type):
        return summed_loss(task, model(inputs), targets) * weight


def summed_loss(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the samples' losses for the outputs of the model.

    Raises UsageError if the task's loss does not have one value per sample.
    """
    losses = task.loss(outputs, targets)
    if losses.shape != (len(targets),):
        raise UsageError(
            f"{type(task).__name__}.loss: expected one loss for each of {len(targets)} samples, "
            f'shape ({len(targets)},), got shape {tuple(losses.shape)}; use reduction="none", and '
            "average over all other dimensions"
        )
    return losses.sum()
