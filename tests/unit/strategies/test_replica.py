"""One replica without peers; with peers see tests/contract/test_strategies.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from paceline.errors import UsageError
from paceline.strategies import TrainBatch, create_strategy
from paceline.training.task import Task
from paceline.workloads.build import build_model, make_task, task_of


class Nobody:
    """A rank without peers."""

    def node(self, _purpose):
        return None

    world = node


NOBODY = Nobody()


def batch_of(samples, global_samples):
    generator = torch.Generator().manual_seed(1)
    return TrainBatch(
        step=0,
        epoch=0,
        inputs=torch.randn(samples, 3, 32, 32, generator=generator),
        targets=torch.arange(samples) % 3,
        sample_ids=np.arange(samples),
        global_samples=global_samples,
    )


def prepared(make_trial, solo, **training):
    trial = make_trial(**training)
    strategy = create_strategy(trial)
    model = build_model(make_task("tiny", classes=3, dropout=trial.training.dropout, seed=3))
    strategy.prepare(task_of(trial.training, classes=3), model, solo, trial, NOBODY)
    return strategy


def test_gradient_is_that_of_the_mean_loss_over_the_global_batch(make_trial, solo):
    strategy = prepared(make_trial, solo, dropout=False)
    batch = batch_of(4, global_samples=12)
    result = strategy.gradient(batch)
    model = build_model(make_task("tiny", classes=3, dropout=False, seed=3))
    loss = cross_entropy(model(batch.inputs), batch.targets)
    loss.backward()
    assert result.loss_sum == pytest.approx(4 * loss.item())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(strategy.gradients()[name], parameter.grad / 3)


def test_gradients_do_not_add_up_over_steps(make_trial, solo):
    strategy = prepared(make_trial, solo)
    strategy.gradient(batch_of(4, 4))
    first = [g.clone() for g in strategy.gradients().values()]
    strategy.gradient(batch_of(4, 4))
    assert all(map(torch.equal, first, strategy.gradients().values()))


def test_empty_share_takes_part_with_no_weight(make_trial, solo):
    strategy = prepared(make_trial, solo)
    result = strategy.gradient(batch_of(0, global_samples=2))
    assert result.loss_sum == 0.0
    assert not any(g.any() for g in strategy.gradients().values())


def test_communication_is_none_without_peers(make_trial, solo):
    result = prepared(make_trial, solo).gradient(batch_of(2, 2))
    assert result.comm_s is None
    assert result.comm_ready_unix_s is None
    assert result.forward_s > 0
    assert result.backward_s > 0


def test_bf16_computes_in_bfloat16_and_leaves_float32_gradients(make_trial, solo):
    exact = prepared(make_trial, solo, dropout=False)
    rough = prepared(make_trial, solo, dropout=False, precision="bf16")
    exact_sum, rough_sum = (s.gradient(batch_of(4, 4)).loss_sum for s in (exact, rough))
    assert rough_sum != exact_sum
    assert rough_sum == pytest.approx(exact_sum, rel=0.02)
    assert {g.dtype for g in rough.gradients().values()} == {torch.float32}


def test_step_moves_the_weights_against_the_gradient(make_trial, solo):
    strategy = prepared(make_trial, solo, momentum=0.0, learning_rate=0.1)
    before = {name: t.clone() for name, t in strategy.state_dict().items()}
    strategy.gradient(batch_of(4, 4))
    strategy.step()
    for name, gradient in strategy.gradients().items():
        torch.testing.assert_close(strategy.state_dict()[name], before[name] - 0.1 * gradient)


class Unused(Task):
    def model(self):
        model = nn.Sequential(nn.Flatten(1), nn.Linear(3072, 3))
        model.register_parameter("scale", nn.Parameter(torch.ones(1)))
        return model


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_parameter_without_gradient_is_named_before_peers_wait_for_it(
    make_trial, context_of, group_of_one
):
    trial = make_trial(ranks=2, task=f"{__name__}:Unused")
    strategy = create_strategy(trial)
    task = task_of(trial.training, classes=3)
    strategy.prepare(task, build_model(task), context_of(0, 2), trial, NOBODY)
    with pytest.raises(UsageError, match=r"parameter scale: expected a gradient, got none"):
        strategy.gradient(batch_of(4, 4))


class MeanLoss(Task):
    def model(self):
        return nn.Sequential(nn.Flatten(1), nn.Linear(3072, 3))

    def loss(self, outputs, targets):
        return cross_entropy(outputs, targets)


def test_loss_that_is_not_of_each_sample_is_refused(make_trial, solo):
    trial = make_trial(task=f"{__name__}:MeanLoss")
    strategy = create_strategy(trial)
    task = task_of(trial.training, classes=3)
    strategy.prepare(task, build_model(task), solo, trial, NOBODY)
    message = (
        r"MeanLoss.loss: expected one loss for each of 4 samples.*got shape \(\); use reduction"
    )
    with pytest.raises(UsageError, match=message):
        strategy.gradient(batch_of(4, 4))
