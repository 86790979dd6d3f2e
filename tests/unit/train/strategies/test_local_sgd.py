"""Local SGD of one rank in this process; with peers see tests/contract/test_compression.py."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.support.strategies import prepared, train_batch
from tests.support.trials import changed
from torch import nn
from torch.nn.functional import cross_entropy

from paceline.train.strategies import local_sgd
from paceline.train.strategies.local_sgd import LocalReplica
from paceline.train.strategies.reduction.flat_layout import FlatReplica
from paceline.train.training.optimizers import TaskOptimizer
from paceline.train.training.task import Task
from paceline.train.workloads.build import build_model, make_task, task_of


def test_rank_without_peers_trains_as_a_sequential_one(make_trial, solo):
    batch = train_batch(4, is_last=True)
    weights = []
    for averaging in (None, {"period_steps": 2}):
        trial = changed(make_trial(), local_strategy="processes", averaging=averaging)
        strategy = prepared(trial, solo)
        result = strategy.gradient(batch)
        assert result.comm_s is None
        assert strategy.step() is None
        weights.append(strategy.state_dict())
        strategy.close(failed=False)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_bytes_per_step_do_not_count_the_steps_before_a_restart(
    make_trial, context_of, monkeypatch
):
    monkeypatch.setattr(local_sgd, "all_reduce_tensors", lambda _: None)
    averaging = {"period_steps": 2}
    trial = changed(make_trial(ranks=2), local_strategy="processes", averaging=averaging)
    sent = []
    for restored_steps in (0, 100):
        strategy = prepared(trial, context_of(0, 2))
        monkeypatch.setattr(strategy._replica, "restore", lambda _: None)
        strategy.restore(SimpleNamespace(steps=restored_steps, of_replica=lambda *_: None))
        assert "sent_bytes_per_step" not in strategy.describe()
        for _ in range(4):
            strategy.gradient(train_batch(4))
            strategy.step()
        sent.append(strategy.describe()["sent_bytes_per_step"])
    assert sent[0] == sent[1] > 0


def test_weights_are_averaged_after_each_period_and_after_the_last_step(
    make_trial, context_of, monkeypatch
):
    averaged_after = []
    trial = changed(make_trial(ranks=2), local_strategy="processes", averaging={"period_steps": 2})
    strategy = prepared(trial, context_of(0, 2))
    for step in range(5):
        monkeypatch.setattr(
            local_sgd, "all_reduce_tensors", lambda _, step=step: averaged_after.append(step)
        )
        strategy.gradient(train_batch(4, is_last=step == 4))
        strategy.step()
    assert averaged_after == [1, 3, 4]


RNG = np.random.default_rng(8)
IMAGES = torch.from_numpy(RNG.standard_normal((6, 3, 32, 32), dtype=np.float32))
LABELS = torch.from_numpy(RNG.integers(0, 3, 6))


def batch(low, high):
    return train_batch(
        high - low, inputs=IMAGES[low:high], targets=LABELS[low:high],
        sample_ids=np.arange(low, high), global_samples=12,
    )  # fmt: skip


def weights_by_hand(momentum, divisors=(4, 2)):
    """After two steps, on samples 0 to 3 and 4 to 5."""
    model = build_model(make_task("tiny", classes=3, dropout=False, seed=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    for (low, high), divisor in zip(((0, 4), (4, 6)), divisors, strict=True):
        optimizer.zero_grad()
        loss = cross_entropy(model(IMAGES[low:high]), LABELS[low:high], reduction="sum")
        (loss / divisor).backward()
        optimizer.step()
    return model.state_dict()


def replica(make_trial, **training):
    trial = make_trial(dropout=False, **training)
    model = build_model(make_task("tiny", classes=3, dropout=False, seed=3))
    return LocalReplica(task_of(trial.training, classes=3), model, trial)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_take_the_mean_of_its_own_samples(make_trial, momentum):
    ours = replica(make_trial, momentum=momentum)
    for part in (batch(0, 4), batch(4, 6)):
        ours.gradient(part)
        ours.step()
    assert_equal(ours.state_dict(), weights_by_hand(momentum))
    assert (ours.momentum is None) == (momentum == 0)


class Groups(Task):
    """Two groups of parameters, one with momentum and dampening."""

    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, 4), nn.Linear(4, 3))

    def optimizer(self, parameters):
        first, second = parameters[:2], parameters[2:]
        dampened = {"params": first, "momentum": 0.9, "dampening": 0.5}
        return torch.optim.SGD([dampened, {"params": second}], lr=0.01)


def test_first_step_is_not_dampened_and_groups_have_their_own_momentum(make_trial):
    trial = make_trial(task=f"{__name__}:Groups")
    task = task_of(trial.training, classes=3)
    ours, wanted = LocalReplica(task, build_model(task), trial), build_model(task)
    optimizer = task.optimizer(list(wanted.named_parameters()))
    for part in (batch(0, 4), batch(4, 6), batch(0, 4)):
        ours.gradient(part)
        ours.step()
        optimizer.zero_grad()
        cross_entropy(wanted(part.inputs), part.targets).backward()
        optimizer.step()
    assert_equal(ours.state_dict(), wanted.state_dict())


class Tied(Task):
    def model(self):
        first, last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        last.weight = first.weight
        return nn.Sequential(first, last)


def test_state_under_other_weights_has_them_under_all_names(make_trial):
    trial = make_trial(task=f"{__name__}:Tied")
    task = task_of(trial.training, classes=3)
    ours = LocalReplica(task, build_model(task), trial)
    before = ours.weights.clone()
    state = ours.state_dict(torch.ones_like(ours.weights))
    assert all((tensor == 1).all() for tensor in state.values())
    assert list(state) == ["0.weight", "1.weight"]
    assert torch.equal(ours.weights, before)
    assert (ours.state_dict()["1.weight"].flatten() == before[:36]).all()


def test_part_of_a_batch_moves_the_weights_by_its_part_of_the_gradient(make_trial):
    trial = make_trial(task=f"{__name__}:Tied")
    task = task_of(trial.training, classes=3)
    ours = FlatReplica(build_model(task))
    before = ours.weights.clone()
    (parameter,) = ours.parameters.values()
    parameter.grad = torch.ones_like(parameter)  # of the loss, as a mean over the batch
    ours.step_part(TaskOptimizer(task, ours.parameters.items()), 0.25)
    moved = before[:36] - trial.training.learning_rate
    torch.testing.assert_close(ours.weights[:36], moved)


def test_mean_may_be_taken_over_another_number(make_trial):
    ours = replica(make_trial)
    for part in (batch(0, 4), batch(4, 6)):
        ours.gradient(part, mean_over=12)
        ours.step()
    assert_equal(ours.state_dict(), weights_by_hand(0.9, divisors=(12, 12)))


def test_another_replica_with_the_same_state_goes_on_as_the_first_would(make_trial):
    first, second = replica(make_trial), replica(make_trial)
    first.gradient(batch(0, 4))
    first.step()
    second.weights.copy_(first.weights)
    second.momentum.copy_(first.momentum)
    second.gradient(batch(4, 6))
    second.step()
    assert_equal(second.state_dict(), weights_by_hand(0.9))


def test_empty_share_changes_nothing(make_trial):
    ours = replica(make_trial)
    ours.gradient(batch(0, 4))
    ours.step()
    before = ours.weights.clone()
    result = ours.gradient(batch(4, 4))
    ours.step()
    assert torch.equal(ours.weights, before)
    assert result.loss_sum == 0
