from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.support.checkpoints import read_checkpoint, save_part
from torch import nn

from paceline.train.strategies.reduction.flat_layout import FlatLayout
from paceline.train.strategies.reduction.node_shards import OptimizerShard, shard_of
from paceline.train.training.state import RankState
from paceline.train.workloads.build import make_task


@pytest.fixture
def task():
    return make_task("tiny", classes=3, learning_rate=0.1, momentum=0.9)


def parameters():
    generator = torch.Generator().manual_seed(0)
    convolution = torch.randn(4, 3, 2, 2, generator=generator)
    return {
        "convolution": nn.Parameter(convolution.contiguous(memory_format=torch.channels_last)),
        "bias": nn.Parameter(torch.randn(4, generator=generator)),
        "linear": nn.Parameter(torch.randn(5, 7, generator=generator)),
    }


def gradients_of(replica, step):
    generator = torch.Generator().manual_seed(100 * replica + step + 1)
    found = {}
    for name, parameter in parameters().items():
        gradient = torch.randn(parameter.shape, generator=generator)
        found[name] = torch.empty_like(parameter.data).copy_(gradient)
    return found


def reduce(shard, layout, own, others):
    """Sum the shards of `own` and `others` in place, as the strategies do."""
    shard.reduce(own, [partial(shard_of, layout, gradients) for gradients in others])


def in_shards(task, workers, rows=None):
    """Return a model, its layout, and the shards of the workers."""
    model = parameters()
    layout = FlatLayout.of(model.items())
    flat = torch.empty(layout.elements)
    layout.bind(model, flat, copy=True)
    owned = layout.shards(workers, rows)
    return model, layout, [OptimizerShard(layout, each, flat, task) for each in owned]


def step_in_shards(task, workers, change=lambda gradients: gradients, rows=None):
    """Weights after 3 steps of which each of `workers` replicas and workers does its part."""
    model, layout, shards = in_shards(task, workers, rows)
    for step in range(3):
        replicas = [change(gradients_of(replica, step)) for replica in range(workers)]
        for worker, shard in enumerate(shards):
            others = [g for w, g in enumerate(replicas) if w != worker]
            reduce(shard, layout, replicas[worker], others)
        for shard in shards:
            shard.step()
    return model


def step_by_hand(task, replicas):
    model = parameters()
    optimizer = torch.optim.SGD(model.values(), lr=0.1, momentum=0.9)
    for step in range(3):
        gradients = [gradients_of(replica, step) for replica in range(replicas)]
        for name, parameter in model.items():
            parameter.grad = torch.stack([g[name] for g in gradients]).sum(0)
        optimizer.step()
    return model


@pytest.mark.parametrize("rows", [None, {"linear": 5}])
@pytest.mark.parametrize("workers", [1, 2, 3, 9])
def test_shards_together_step_as_one_optimizer(task, workers, rows):
    found = step_in_shards(task, workers, rows=rows)
    wanted = step_by_hand(task, workers)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])


def test_gradients_in_other_strides_are_summed_alike(task):
    def contiguous(gradients):
        return {name: gradient.contiguous() for name, gradient in gradients.items()}

    found, wanted = step_in_shards(task, 2, contiguous), step_by_hand(task, 2)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])


def test_reduced_gradients_are_the_sums_of_the_shard_in_place(task):
    model = parameters()
    layout = FlatLayout.of(model.items())
    shard = OptimizerShard(layout, layout.shards(2)[0], torch.zeros(layout.elements), task)
    own, other = gradients_of(0, 0), gradients_of(1, 0)
    wanted = (own["convolution"] + other["convolution"]).clone()
    reduce(shard, layout, own, [other])
    # of 7 lines, 4
    assert [part.name for part in shard.parameter_shards] == ["convolution", "bias"]
    torch.testing.assert_close(own["convolution"], wanted)
    flat = layout.in_storage_order("convolution", wanted)
    torch.testing.assert_close(shard.gradient_tensors()[0], flat)


def test_worker_without_a_shard_does_nothing(task):
    layout = FlatLayout.of([("bias", nn.Parameter(torch.ones(3)))])
    flat = torch.ones(layout.elements)
    shard = OptimizerShard(layout, layout.shards(2)[1], flat, task)
    reduce(shard, layout, {"bias": torch.ones(3)}, [])
    shard.step()
    assert shard.gradient_tensors() == []
    assert (flat == 1).all()


def test_shard_that_another_node_steps_keeps_its_weights_and_saves_nothing():
    layout = FlatLayout.of([("bias", nn.Parameter(torch.ones(3)))])
    flat, state = torch.ones(layout.elements), RankState()
    shard = OptimizerShard(layout, layout.shards(1)[0], flat, None)
    reduce(shard, layout, {"bias": torch.ones(3)}, [])
    assert shard.squared_norm() == 0
    shard.step()
    shard.add_to(state)
    assert shard.gradient_tensors() == []
    assert (flat == 1).all()
    assert state == RankState()
    (weights,) = shard.weights()
    weights.fill_(2)
    assert (flat[:3] == 2).all()


def test_state_of_two_workers_is_continued_by_three(task, tmp_path):
    def step_alone(step):
        gradients = gradients_of(0, step)
        for shard in shards:
            reduce(shard, layout, gradients, [])
            shard.step()

    _, layout, shards = in_shards(task, 2)
    step_alone(0)
    for rank, shard in enumerate(shards):
        state = RankState()
        shard.add_to(state)
        save_part(tmp_path, state, rank, 2, steps=1)
    model, layout, shards = in_shards(task, 3, {"linear": 5})
    step_alone(7)  # of another training
    for shard in shards:
        shard.restore(read_checkpoint(tmp_path))
    step_alone(1)
    step_alone(2)
    for name, wanted in step_by_hand(task, 1).items():
        torch.testing.assert_close(model[name], wanted)
