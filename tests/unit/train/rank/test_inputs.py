"""Inputs of the model from stored samples, also where a rank or a replica has none."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from paceline.collectives.message_schedules import share_bounds
from paceline.train.data.batches import Batch
from paceline.train.rank.loop import Loop
from paceline.train.training.strategy import GradientResult
from paceline.train.training.task import Task, TaskSettings


class Stacked(Task):
    """Its conversion needs at least one sample."""

    def model(self):
        return nn.Linear(3, 2)

    def to_input(self, samples):
        return torch.stack([torch.from_numpy(sample).float() + 1 for sample in samples])


class Workers:
    """A strategy that divides samples among replicas, and keeps its batches."""

    def __init__(self, replicas):
        self.replicas, self.batches = replicas, []

    def for_parts(self, samples, task):
        for replica in range(self.replicas):
            task(slice(*share_bounds(samples, replica, self.replicas)))

    def gradient(self, batch):
        self.batches.append(batch)
        return GradientResult(
            loss_sum=0.0, forward_s=0.0, backward_s=0.0, comm_s=None, comm_ready_unix_s=None
        )

    def step(self):
        return None


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("samples", [4, 1, 0])
def test_conversion_of_a_task_gets_no_empty_part(samples, replicas):
    task = Stacked(TaskSettings(input_shape=(3,), input_dtype="float64"))
    order = SimpleNamespace(
        first_step=0, step=lambda _: SimpleNamespace(sample_ids=range(9)), steps=1
    )
    strategy, stored = Workers(replicas), np.random.default_rng(1).random((samples, 3))
    loop = Loop(order=order, task=task, strategy=strategy, rank=0, counts_samples=True)
    batch = Batch(0, 0, np.arange(samples), stored, np.zeros(samples, dtype=np.int64))
    assert len(list(loop.steps([batch]))) == 1
    (found,) = strategy.batches
    assert found.inputs.dtype == torch.float32
    assert torch.equal(found.inputs, torch.from_numpy(stored).float() + 1)
