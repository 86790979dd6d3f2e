"""Activation checkpointing stores less: measured by the storages that are alive."""

from __future__ import annotations

import weakref

import torch
from tests.unit.train.strategies.own_training import trial_of
from tests.unit.train.strategies.pipeline.node import batch_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from paceline.base.torch_internals import storage_number
from paceline.train.training.checkpointing import checkpoint_activations
from paceline.train.training.passes import run_passes
from paceline.train.training.task import Task
from paceline.train.workloads.build import build_model, task_of


class Chain(Task):
    """Many layers that store their outputs."""

    def model(self):
        return nn.Sequential(nn.Conv2d(3, 1, 1), *(nn.Tanh() for _ in range(25)), nn.Flatten(1))


class PeakBytes(TorchDispatchMode):
    """Record the largest sum of the storages that operations create and keep alive."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.alive = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {storage_number(t) for t in tree_iter(args) if isinstance(t, torch.Tensor)}
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                number, storage = storage_number(tensor), tensor.untyped_storage()
                if number not in given | self.alive:
                    self.alive.add(number)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self.end, number, storage.nbytes())
        return result

    def end(self, number, size):
        self.alive.discard(number)
        self.now -= size


def peak_of_a_step(trial, samples):
    task = task_of(trial.training, classes=3)
    model = build_model(task)
    checkpoint_activations(task, model, trial)
    with PeakBytes() as memory:
        run_passes(task, model, batch_of(trial, 0, samples), trial.training)
    return memory.peak


def test_checkpointing_stores_about_twice_the_square_root_of_the_layers():
    plain, with_checkpoints = (
        peak_of_a_step(
            trial_of("sequential", task=f"{__name__}:Chain", activation_checkpointing=value), 4
        )
        for value in (False, True)
    )
    output = 4 * 4 * 32 * 32  # bytes of each layer for 4 samples
    assert plain >= 25 * output
    assert with_checkpoints < 16 * output
