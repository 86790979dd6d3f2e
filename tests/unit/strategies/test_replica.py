"""One replica without peers; with peers see tests/contract/test_strategies.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from paceline.strategies import TrainBatch, create_strategy
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
