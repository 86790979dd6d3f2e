"""A user's task is trained by every strategy as by torch alone."""

from __future__ import annotations

import pytest
from tests.unit.train.strategies import own_models
from tests.unit.train.strategies.own_training import (
    SIZES,
    TASK,
    TOLERANCE,
    TRIALS,
    train,
    train_by_hand,
    trial_of,
)
from tests.unit.train.strategies.pipeline.node import distance, update_distance

from paceline.analysis.equivalence.tolerances import tolerance
from paceline.train.strategies.reduction.node_shards import OptimizerShard
from paceline.train.training import passes
from paceline.train.training.tensors import sha256_of


@pytest.fixture(scope="module")
def by_hand():
    return train_by_hand(trial_of("sequential"))


@pytest.mark.parametrize("name", TRIALS)
def test_own_optimizer_schedule_loss_clipping_and_accumulation_are_equivalent(name, by_hand):
    found = train(trial_of(**TRIALS[name]))
    for _, weights in found:
        assert distance(weights, by_hand[1]) < TOLERANCE
    assert distance(found[0][0], by_hand[0]) < 10 * TOLERANCE
    assert len({sha256_of(weights) for _, weights in found}) == 1


def step_the_schedule_twice(monkeypatch):
    """On the worker that owns the first parameter."""
    step = OptimizerShard.step

    def twice(self, squared_norm=None):
        step(self, squared_norm)
        if self.parameter_shards[0].offset == 0:
            self._optimizer._schedule.step()

    monkeypatch.setattr(OptimizerShard, "step", twice)


def sum_tied_weights_twice(monkeypatch):
    """Double the gradient of the tied weight, as a reducer does that adds it once per layer."""
    reduce = OptimizerShard.reduce

    def doubled(self, own, others, factors=()):
        reduce(self, own, others, factors)
        for shard, parameter in zip(self.parameter_shards, self._parameters, strict=True):
            if shard.name == "3.up.weight":
                parameter.grad.mul_(2)

    monkeypatch.setattr(OptimizerShard, "reduce", doubled)


def see_a_sample_twice(monkeypatch):
    """The second replica trains on the last sample of the first one, too."""
    bounds = passes.share_bounds

    def overlapping(samples, replica, replicas):
        low, high = bounds(samples, replica, replicas)
        return (low - 1, high) if replica == 1 and replicas == 2 else (low, high)

    monkeypatch.setattr(passes, "share_bounds", overlapping)


@pytest.mark.parametrize(
    ("fault", "task"),
    [
        (None, f"{TASK}:MyTask"),
        (step_the_schedule_twice, f"{TASK}:MyTask"),
        (see_a_sample_twice, f"{TASK}:MyTask"),
        (None, f"{own_models.__name__}:Transformer"),
        (sum_tied_weights_twice, f"{own_models.__name__}:Transformer"),
    ],
)
def test_faults_in_the_parts_of_a_task_are_not_equivalent(fault, task, monkeypatch):
    trial = trial_of(**TRIALS["threads-2"], task=task)
    _, wanted = train_by_hand(trial)
    if fault is not None:
        fault(monkeypatch)
    ((_, found),) = train(trial)
    limit = tolerance("fp32", "fp32", len(SIZES)).weights
    difference = update_distance(trial, found, wanted)
    assert difference < limit / 10 if fault is None else difference > limit
