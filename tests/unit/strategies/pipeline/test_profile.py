from __future__ import annotations

import pytest
import torch
from tests.support.models import TINY_VGG
from tests.unit.strategies.pipeline.node import pipeline_trial

from paceline.strategies.pipeline.profile import LayerTimes, Profile, profile_layers
from paceline.workloads.build import build_model, make_task
from paceline.workloads.facts import legal_split_points


def times(forward_s, backward_s, copy_s):
    return LayerTimes(
        forward_s=forward_s, backward_s=backward_s, deferred_s=0.5, step_s=0.25,
        copy_s=copy_s,
    )  # fmt: skip


def test_costs_of_a_step_lie_on_the_layers_that_a_stage_can_begin_with():
    profile = Profile([0, 2], [times(1, 2, 0.125), times(3, 4, 9)], 4, replicas=2)
    assert profile.layer_costs_s(3) == [4 * 3 + 0.5 + 0.125, 0, 4 * 7 + 0.5 + 0.125]
    assert profile.crossing_costs_s(3) == [0, 0, 4 * 0.125]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("path", ["tiny", TINY_VGG])
def test_measuring_times_every_layer_and_changes_nothing(path, precision):
    training = pipeline_trial(2, 1, dropout=True, precision=precision).training
    task = make_task(path, classes=3, image_size=32, dropout=True, seed=1)
    net = build_model(task)
    layers = task.blocks(net)
    before = {name: p.clone() for name, p in net.named_parameters()}
    profile = profile_layers(task, layers, training, samples=3, micro_batches=2, replicas=1)
    assert profile.indexes == [0, *legal_split_points(layers)]
    assert len(profile.times) == len(profile.indexes)
    assert all(t.forward_s > 0 and t.copy_s > 0 for t in profile.times)
    linear = [t for t in profile.times if t.deferred_s > 0]
    assert len(linear) == 3
    assert all(t.backward_s > 0 and t.step_s > 0 for t in linear)
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
