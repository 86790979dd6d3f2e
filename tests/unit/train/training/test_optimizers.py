"""Updates with parts of a batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.train.training.optimizers import TaskOptimizer
from paceline.train.training.task import Task, TaskSettings


class Decayed(Task):
    """SGD with weight decay, whose rate halves after each batch."""

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.01, weight_decay=0.1)

    def schedule(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


class TensorRate(Decayed):
    """The same with a rate that is a tensor."""

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=torch.tensor(0.01), weight_decay=0.1)


class Normalised(Task):
    """An optimiser whose update does not depend on the length of the gradient."""

    def optimizer(self, parameters):
        return torch.optim.Adam(parameters, lr=0.01)


def trained(task_class, shares, batches=1, **settings):
    """Return the parameter after batches of updates with these shares and equal gradients."""
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = TaskOptimizer(task_class(TaskSettings(**settings)), [("w", parameter)])
    for _ in range(batches):
        for share in shares:
            parameter.grad = torch.tensor([0.5, 3.0])
            if share is None:
                optimizer.step()
            else:
                optimizer.step_part(share)
    return parameter.detach(), optimizer


@pytest.mark.parametrize("task_class", [Decayed, TensorRate, Normalised])
def test_parts_of_a_batch_move_the_weights_as_far_as_one_step(task_class):
    whole, _ = trained(task_class, [None])
    parts, _ = trained(task_class, [0.25, 0.5, 0.25])
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=0)


@pytest.mark.parametrize("task_class", [Decayed, TensorRate])
def test_schedule_counts_whole_batches(task_class):
    _, optimizer = trained(task_class, [1 / 3] * 3, batches=4)
    assert optimizer.learning_rates() == {"w": pytest.approx(0.01 * 0.5**4)}


def test_optimiser_of_one_worker_counts_the_batches_of_all():
    _, optimizer = trained(Decayed, [])
    for share in (0.25, 0.0, 0.5):
        for _, parameter in optimizer.parameters():
            parameter.grad = torch.ones(2)
        optimizer.step_part(share, progress=1.0)
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**3)


def test_warm_up_counts_whole_batches():
    whole, _ = trained(Normalised, [None], batches=2, learning_rate_warmup_steps=4)
    parts, _ = trained(Normalised, [0.5, 0.5], batches=2, learning_rate_warmup_steps=4)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=0)


def test_norm_of_all_gradients_is_read_at_once(monkeypatch):
    """A GPU is waited for at each value that is read."""
    named = [(f"w{number}", nn.Parameter(torch.zeros(2))) for number in range(3)]
    optimizer = TaskOptimizer(Decayed(TaskSettings()), named)
    for number, (_, parameter) in enumerate(named):
        parameter.grad = torch.tensor([3.0, 4.0]) * number
    reads = []

    def watched(name):
        read = getattr(torch.Tensor, name)

        def call(tensor):
            reads.append(name)
            return read(tensor)

        return call

    for name in ("__float__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, watched(name))
    assert optimizer.squared_norm() == 25.0 + 100.0
    assert len(reads) == 1
