"""The predicted memory of steps, against what torch allocates in a real step."""

from __future__ import annotations

import pytest
import torch
from tests.unit.strategies.own_training import TASK, TRIALS, trial_of
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
    return live.peak


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("task", [VGG, f"{TASK}:MyTask"])
def test_fake_step_needs_what_a_real_one_does(task, checkpointed):
    trial = trial_of("sequential", task=task, activation_checkpointing=checkpointed)
    fake = fake_of(trial)
    checkpoint_activations(fake.task, fake.model, trial)
    assert fake.step(16).peak == pytest.approx(real_peak(trial, 16), rel=0.05)


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


# Stages store little of so few layers: how their heaps are fragmented decides.
@pytest.mark.parametrize("name", [name for name in TRIALS if "stages" not in TRIALS[name]])
def test_prediction_with_checkpointing_is_smaller(name):
    plain = predicted(name, 240, task=CHAIN)
    assert predicted(name, 240, task=CHAIN, activation_checkpointing=True).total < plain.total


def asynchronous(name, options=(), batch=24):
    """Return the fake model and the predicted memory of a trial without a barrier."""
    trial = trial_of(**TRIALS["pipeline-2" if name == "pipeline" else "processes-2"], task=VGG)
    rows = trial.model_dump() | {
        "local_strategy": name,
        "strategy_options": (trial.strategy_options.model_dump() if name == "pipeline" else {})
        | dict(options),
    }
    trial = type(trial).model_validate(rows)
    training = trial.training.model_copy(update={"global_batch": batch})
    fake = fake_of(trial.model_copy(update={"training": training}))
    return fake, load_object(type(create_strategy(trial)).memory_model)(fake)


def test_server_needs_its_shard_and_the_gradients_of_all_workers():
    modes = ("asynchronous", "shat")
    # With one image for each worker, activations are small.
    found = {mode: asynchronous("parameter-server", {"update_mode": mode}, 2) for mode in modes}
    fake, plain = found["asynchronous"]
    # own weights, accrued gradients, and of the shard: weights, gradient, that of the other worker
    assert min(plain.ranks) > fake.weights + fake.gradients + 3 * fake.gradients // 2
    assert len(set(plain.ranks)) == 1
    assert plain.shared == 0
    assert found["shat"][1].total > plain.total  # each worker has an optimiser of the whole


def test_processes_of_hogwild_share_the_weights_and_have_their_own_optimisers():
    fake, found = asynchronous("hogwild")
    assert found.shared == fake.gradients
    assert min(found.ranks) > sum(fake.state) + fake.step(12).peak
    assert asynchronous("hogwild", batch=48)[1].total > found.total


def test_pipedream_keeps_copies_of_the_weights():
    # With a micro-batch of one image, activations are small.
    (fake, drained), (_, stream) = (
        asynchronous("pipeline", {"schedule": schedule}, batch=2)
        for schedule in ("1f1b", "pipedream")
    )
    assert stream.shared == drained.shared
    assert stream.ranks[0] > fake.weights  # two copies of the first of two stages of equal size
    vertical = {"schedule": "pipedream", "vertical_sync": True}
    assert asynchronous("pipeline", vertical, batch=2)[1].ranks[1] > stream.ranks[1]
