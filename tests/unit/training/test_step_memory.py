"""The predicted memory of steps, against what torch allocates in a real step."""

from __future__ import annotations

import pytest
import torch
from tests.unit.strategies.test_own_task import TASK, TRIALS, trial_of
from torch import nn

from paceline.spec.extensions import load_object
from paceline.strategies import create_strategy
from paceline.training.checkpointing import checkpoint_activations
from paceline.training.live_bytes import LiveBytes
from paceline.training.passes import run_passes
from paceline.training.step_memory import FakeModel
from paceline.training.strategy import TrainBatch
from paceline.training.task import Task
from paceline.workloads.build import build_model, on_meta_device, task_of

CHAIN = f"{__name__}:Chain"
VGG = "paceline.workloads.complex_small.task:TinyVGG"


def fake_of(trial):
    task = task_of(trial.training, classes=3)
    return FakeModel(task, on_meta_device(task), torch.zeros(1, dtype=torch.int64), trial)


def real_peak(trial, samples):
    """Peak of the tensors of a real step beside weights and inputs."""
    task = task_of(trial.training, classes=3)
    model = build_model(task)
    checkpoint_activations(task, model, trial)
    batch = TrainBatch(
        step=0,
        epoch=0,
        inputs=torch.zeros(samples, 3, 32, 32),
        targets=torch.zeros(samples, dtype=torch.int64),
        sample_ids=torch.arange(samples).numpy(),
        global_samples=samples,
    )
    with LiveBytes() as live:
        run_passes(task, model, batch, trial.training)
    return live.peak - batch.inputs.nbytes


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("task", [VGG, f"{TASK}:MyTask"])
def test_fake_step_needs_what_a_real_one_does(task, checkpointed):
    trial = trial_of("sequential", task=task, activation_checkpointing=checkpointed)
    fake = fake_of(trial)
    checkpoint_activations(fake.task, fake.model, trial)
    assert fake.peak_of_step(16) == pytest.approx(real_peak(trial, 16), rel=0.05)


class Chain(Task):
    """Many layers that store their outputs."""

    def model(self):
        return nn.Sequential(nn.Conv2d(3, 1, 1), *(nn.Tanh() for _ in range(25)), nn.Flatten(1))


def test_checkpointing_stores_about_twice_the_square_root_of_the_layers():
    plain, checkpointed = (
        real_peak(trial_of("sequential", task=CHAIN, activation_checkpointing=value), 4)
        for value in (False, True)
    )
    output = 4 * 4 * 32 * 32  # bytes of each layer for 4 samples
    assert plain >= 25 * output
    assert checkpointed < 15 * output


def predicted(name, batch, task=VGG, **training):
    trial = trial_of(**TRIALS[name], task=task, global_batch=batch, **training)
    model = type(create_strategy(trial)).memory_model
    return load_object(model)(fake_of(trial))


@pytest.mark.parametrize("name", TRIALS)
def test_every_strategy_has_a_prediction_that_grows_with_the_batch(name):
    small, large = predicted(name, 12), predicted(name, 48)
    assert len(small.ranks) == TRIALS[name].get("ranks", 1)
    assert large.total > small.total
    has_shared_weights = "ranks" in TRIALS[name]
    assert (small.shared > 0) == has_shared_weights


@pytest.mark.parametrize("name", TRIALS)
def test_prediction_with_checkpointing_is_smaller(name):
    plain = predicted(name, 240, task=CHAIN)
    assert predicted(name, 240, task=CHAIN, activation_checkpointing=True).total < plain.total
