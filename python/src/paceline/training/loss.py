"""The loss: the sum of the samples' cross entropies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.training.dropout import set_sample_keys
from paceline.training.precision import autocast

if TYPE_CHECKING:
    from paceline.plan.trial import Training
    from paceline.training.strategy import TrainBatch


def sum_of_losses(model: nn.Module, batch: TrainBatch, training: Training) -> Tensor:
    """Run the forward pass; return the sum of losses: a scalar with a graph, on the device of the
    tensors.

    An empty batch is replaced by one sample with weight 0, so its gradients are all 0.
    """
    images, labels, ids = batch.images, batch.labels, batch.sample_ids
    weight = 1.0
    if len(ids) == 0:
        images = images.new_zeros((1, *images.shape[1:]))
        labels = labels.new_zeros(1)
        ids, weight = np.zeros(1, dtype=np.int64), 0.0
    set_sample_keys(model, training.seed, batch.epoch, ids)
    with autocast(training, images.device.type):
        loss = summed_loss(model(images), labels)
    return loss * weight if weight != 1.0 else loss


def summed_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the samples' losses for the outputs of the model."""
    return cross_entropy(outputs, labels, reduction="sum")
