from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support import oracle

from paceline.plan.trial import Trial
from paceline.strategies import TrainBatch
from paceline.training.transforms import put_in_memory_format, torch_memory_format
from paceline.workloads.build import build_model, task_of

SEED, CLASSES, SAMPLES = 3, 3, 40


@pytest.fixture
def make_batch():
    """A batch of some of SAMPLES random images, in the training's memory format."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    noise = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    images = noise + (labels.float() - 1).view(-1, 1, 1, 1)

    def make(step, samples, training, global_samples=None):
        ids = (np.arange(samples) + 7 * step) % SAMPLES
        return TrainBatch(
            step=step,
            epoch=step // 4,
            inputs=images[ids].to(memory_format=torch_memory_format(training.memory_format)),
            targets=labels[ids],
            sample_ids=ids,
            global_samples=global_samples or samples,
        )

    return make


@pytest.fixture
def make_strategy_trial(make_trial):
    """A tiny trial of a strategy; `dropout` and the like override its training."""

    def make(strategy, replicas, *, oversubscribe=True, **training):
        base = make_trial(
            oversubscribe=oversubscribe, **{"dropout": False, "global_batch": 12, **training}
        )
        rows = base.model_dump() | {
            "local_strategy": strategy,
            "strategy_options": {},
            "placement": base.placement.model_dump()
            | {"threads_per_rank": replicas, "replicas_per_node": replicas},
        }
        return Trial.model_validate(rows)

    return make


@pytest.fixture
def build():
    """The initial model of a training, in its memory format."""

    def make(training):
        model = build_model(task_of(training, classes=CLASSES))
        put_in_memory_format(model, training.memory_format)
        return model

    return make


@pytest.fixture
def train_by_hand(build):
    """One model, all samples, torch alone: gradients of the first batch, weights after the last."""

    def train(training, batches):
        model = build(training)
        rate, momentum = training.learning_rate, training.momentum
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
        whole = [oracle.Batch(b.epoch, b.sample_ids.tolist(), b.inputs, b.targets) for b in batches]
        gradients = oracle.train_alone(
            model, whole, optimizer, seed=training.seed, precision=training.precision
        )
        return gradients[0], model.state_dict()

    return train


@pytest.fixture
def difference():
    """Largest difference of two sets of tensors, relative to the length of each tensor, or of its
    difference from `origin`."""

    def compare(found, wanted, origin=None):
        assert list(found) == list(wanted)
        return max(
            ((found[n] - wanted[n]).norm() / (wanted[n] - (origin[n] if origin else 0)).norm())
            for n in wanted
        ).item()

    return compare
