"""The scale of the loss under fp16: overflow, growth, checkpoint, and the optimiser's part."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.trials import tiny_trial
from torch import nn

from paceline.train.training.optimizers import LOSS_SCALE, LossScale, TaskOptimizer
from paceline.train.training.task import Task, TaskSettings


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


def test_scale_grows_after_2000_finite_steps_in_a_row():
    scale = LossScale()
    periods = [(1.0, 1999, 16), (math.inf, 1, 15), (1.0, 1999, 15), (1.0, 1, 16), (1.0, 1999, 16)]
    for norm, steps, power in periods:
        for _ in range(steps):
            scale.update(norm)
        assert scale.value == 2.0**power


def test_only_fp16_scales_the_loss():
    trials = [tiny_trial(training={"precision": each}) for each in ("fp16", "fp32", "bf16")]
    (fp16, *others) = (LossScale.of(trial.training) for trial in trials)
    assert fp16.describe() == {"loss_scale": 2.0**16, "skipped_steps": 0}
    for scale in others:
        scale.update(math.inf)
        scale.restore([2.0**9, 3])
        assert (scale.value, scale.state, scale.describe()) == (1.0, {}, {})


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
