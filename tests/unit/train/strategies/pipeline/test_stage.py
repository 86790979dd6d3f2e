from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.train.strategies.pipeline.node import batch_of, layers_of, pipeline_trial

from paceline.train.strategies.pipeline.links import SplitPoint, StageLink
from paceline.train.strategies.pipeline.partition import trace
from paceline.train.strategies.pipeline.stage import Stage, actions
from paceline.train.training import devices

CUT = 6


class FakeSlots:
    """Slots that are always ready, and write down what is done to them."""

    def __init__(self, name, calls, count, size):
        self.name, self.calls = name, calls
        self.memory = [np.zeros(size, np.uint8) for _ in range(count)]

    def slot(self, index):
        return self.memory[index]

    def begin(self):
        self.calls.append((self.name, "begin"))

    def post(self, index):
        self.calls.append((self.name, "post", index))

    def wait(self, index):
        self.calls.append((self.name, "wait", index))

    def release(self):
        self.calls.append((self.name, "release"))


@pytest.fixture
def last_stage():
    """The last of two stages with 2 micro-batches, and what it does with its slots."""
    trial, calls = pipeline_trial(2, 2), []
    task, layers = layers_of(trial)
    activation = trace(task, layers, trial.training)[CUT - 1]
    size = 4 * activation.bytes_per_sample
    links = [
        StageLink(FakeSlots(name, calls, 2, size), activation)
        for name in ("activations", "gradients")
    ]
    stage = Stage(
        task, layers[CUT:], actions("1f1b", 1, 2, 2), SplitPoint(*links), None, trial.training
    )
    return stage, trial, calls


@pytest.mark.parametrize("samples", [8, 1, 0])
def test_every_micro_batch_is_waited_for_and_answered_with_or_without_samples(last_stage, samples):
    stage, trial, calls = last_stage
    stage.run(batch_of(trial, 0, samples))
    assert calls == [
        ("activations", "wait", 0),
        ("gradients", "begin"),
        ("gradients", "post", 0),
        ("activations", "wait", 1),
        ("gradients", "post", 1),
        ("activations", "release"),
    ]


def test_passes_are_forgotten_once_they_went_backward(last_stage):
    stage, trial, _ = last_stage
    stage.run(batch_of(trial, 0, 8))
    assert not stage._passes


def test_times_are_the_whole_step_without_gaps(last_stage, monkeypatch):
    stage, trial, _ = last_stage
    clock = iter(range(1000))
    monkeypatch.setattr(devices.time, "perf_counter", lambda: float(next(clock)))
    result = stage.run(batch_of(trial, 0, 8))
    # the clock moves by 1 when it is read: twice to begin with, last at the end
    assert result.forward_s + result.backward_s + result.bubble_s == next(clock) - 2
    assert result.bubble_s == 3  # two waits and the beginning of the gradients


def test_share_without_samples_leaves_gradients_of_zero(last_stage):
    stage, trial, _ = last_stage
    for samples in (8, 0):
        stage.run(batch_of(trial, 0, samples))
    gradients = [p.grad for p in stage._module.parameters()]
    assert gradients
    assert not any(torch.any(g) for g in gradients)
