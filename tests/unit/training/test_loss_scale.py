"""The scale of the loss under fp16: overflow, growth, checkpoint, and the optimiser's part."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from paceline.training.loss_scale import LOSS_SCALE, LossScale
from paceline.training.optimizers import TaskOptimizer
from paceline.training.task import Task, TaskSettings


class Clipped(Task):
    clip_norm = 1.0


def stepped(task_class, gradient, scale):
    """The weight after one step from zeros, and whether the scale was halved."""
    parameter = nn.Parameter(torch.zeros(2))
    task = task_class(TaskSettings(learning_rate=0.5, momentum=0.0))
    optimizer = TaskOptimizer(task, [("w", parameter)], scale)
    parameter.grad = torch.tensor(gradient) * scale.value
    before, norm = scale.value, optimizer.squared_norm()
    optimizer.step(norm)
    scale.update(norm)
    return parameter.detach().tolist(), scale.value == before / 2


def test_optimiser_removes_the_scale():
    assert stepped(Task, [3.0, 4.0], LossScale()) == ([-1.5, -2.0], False)


def test_norm_is_clipped_without_the_scale():
    weights, _ = stepped(Clipped, [3.0, 4.0], LossScale())
    assert weights == pytest.approx([-0.3, -0.4], rel=1e-5)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_gradient_that_is_not_finite_changes_no_weight_and_halves_the_scale(value):
    scale = LossScale()
    assert stepped(Task, [value, 1.0], scale) == ([0.0, 0.0], True)
    assert scale.describe() == {"loss_scale": 2.0**15, "skipped_steps": 1}


def test_scale_grows_after_many_finite_steps():
    scale = LossScale()
    for _ in range(1999):
        scale.update(1.0)
    assert scale.value == 2.0**16
    scale.update(1.0)
    assert scale.value == 2.0**17


def test_restored_scale_continues_and_a_missing_one_changes_nothing():
    scale, other = LossScale(), LossScale()
    scale.update(math.inf)
    for _ in range(7):
        scale.update(1.0)
    other.restore(None)
    assert other.value == 2.0**16
    other.restore(scale.state[LOSS_SCALE])
    assert other.state == scale.state == {LOSS_SCALE: [2.0**15, 7]}


def test_gradients_are_compared_without_the_scale():
    found = LossScale().unscaled({"w": torch.full((2,), 2.0**16)})
    assert found["w"].tolist() == [1.0, 1.0]
