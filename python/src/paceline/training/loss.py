"""Forward and backward pass of one replica for its part of a batch."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.plan.sample_order import share_bounds
from paceline.training.dropout import set_sample_keys
from paceline.training.precision import autocast

if TYPE_CHECKING:
    from paceline.plan.trial import Training
    from paceline.training.devices import InputMover
    from paceline.training.strategy import TrainBatch


def share_of(batch: TrainBatch, replica: int, replicas: int) -> TrainBatch:
    """Return the contiguous part of a rank's batch for one of its replicas; may be empty.

    Nothing is copied; the part keeps the memory format of the batch.
    """
    low, high = share_bounds(len(batch.sample_ids), replica, replicas)
    return replace(
        batch,
        images=batch.images[low:high],
        labels=batch.labels[low:high],
        sample_ids=batch.sample_ids[low:high],
    )


def to_device(batch: TrainBatch, mover: InputMover) -> TrainBatch:
    """Return the batch with its tensors on the mover's device."""
    return replace(batch, images=mover.move(batch.images), labels=mover.move(batch.labels))


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Result of a replica's passes on a CPU: times of perf_counter, and when the gradients were
    ready."""

    loss_sum: float
    forwarded_s: float
    ready_s: float
    ready_unix_s: float


def run_passes(replica: nn.Module, batch: TrainBatch, training: Training) -> PassTimes:
    """Run forward and backward pass of a replica's part of a batch. Gradients are replaced by those
    of this part's contribution to the global mean."""
    for parameter in replica.parameters():
        parameter.grad = None
    loss = sum_of_losses(replica, batch, training)
    loss_sum = float(loss.detach())
    forwarded_s = time.perf_counter()
    (loss / batch.global_samples).backward()  # type: ignore[no-untyped-call]
    return PassTimes(loss_sum, forwarded_s, time.perf_counter(), time.time())


def sum_of_losses(model: nn.Module, batch: TrainBatch, training: Training) -> Tensor:
    """Return the sum of the samples' cross entropies: a scalar with a graph, on the device of the
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
        loss = cross_entropy(model(images), labels, reduction="sum")
    return loss * weight if weight != 1.0 else loss
