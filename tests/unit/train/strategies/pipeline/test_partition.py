"""Split points: shapes and costs of layers, measured times, and the best places."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.models import TINY_VGG
from tests.unit.train.strategies.pipeline.node import layers_of, pipeline_trial

from paceline.train.strategies.pipeline.partition import (
    Activation,
    LayerProfile,
    LayerTimes,
    balanced_split_points,
    layer_bytes,
    profile_layers,
    stage_bounds,
    trace,
)
from paceline.train.training.dropout import set_sample_keys
from paceline.train.training.passes import autocast
from paceline.train.workloads.build import build_model, make_task
from paceline.train.workloads.facts import legal_split_points


@pytest.fixture
def layers():
    task = make_task("tiny", classes=3)
    return task.blocks(build_model(task))


def costliest(costs, crossing, split_points):
    ends = [0, *split_points, len(costs)]
    padded = [0, *crossing[1:], 0]
    return max(sum(costs[low:high]) + padded[low] + padded[high] for low, high in pairwise(ends))


@given(st.data())
def test_no_other_legal_cuts_are_better(data):
    costs = data.draw(st.lists(st.integers(0, 20), min_size=2, max_size=9))
    crossing = data.draw(st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs)))
    places = data.draw(st.sets(st.integers(1, len(costs) - 1), min_size=1))
    stages = data.draw(st.integers(1, len(places) + 1))
    found = balanced_split_points(costs, stages, sorted(places), crossing)
    others = combinations(sorted(places), stages - 1)
    assert set(found) <= places
    assert len(found) == stages - 1
    assert costliest(costs, crossing, found) == min(costliest(costs, crossing, o) for o in others)


def test_stages_follow_one_another():
    assert stage_bounds([3, 5], 9) == [(0, 3), (3, 5), (5, 9)]


def test_layers_are_the_model_in_sequence(layers):
    model = build_model(make_task("tiny", classes=3, dropout=True, seed=1))
    names = [f"{name}.{p}" for name, layer in layers for p, _ in layer.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("path", ["tiny", TINY_VGG])
def test_traced_shapes_and_types_are_those_of_a_real_pass(path, precision, memory_format):
    training = pipeline_trial(2, 1, precision=precision, memory_format=memory_format).training
    task = make_task(path, classes=3, image_size=32, dropout=True, seed=1)
    net = build_model(task)
    layers = task.blocks(net)
    found = trace(task, layers, training)
    units = torch.randn(2, 3, 32, 32)
    set_sample_keys(net, 1, 0, [4, 5])
    with autocast(training):
        for (_, layer), activation in zip(layers, found, strict=True):
            units = layer(units)
            assert tuple(units.shape[1:]) == activation.shape
            assert units.dtype == activation.dtype
            assert activation.channels_last == (
                units.dim() == 4 and memory_format == "channels_last"
            )


@pytest.mark.parametrize("channels_last", [False, True])
def test_view_keeps_the_physical_order(channels_last):
    activation = Activation((2, 3, 4), torch.bfloat16, channels_last)
    memory = torch.zeros(256, dtype=torch.uint8)
    view = activation.view(memory, 5)
    assert activation.bytes_per_sample == 48
    assert view.shape == (5, 2, 3, 4)
    assert view.data_ptr() == memory.data_ptr()
    order = torch.channels_last if channels_last else torch.contiguous_format
    assert view.is_contiguous(memory_format=order)


def test_bytes_are_parameters_and_what_is_handed_on():
    trial = pipeline_trial(2, 1)
    task, layers = layers_of(trial)
    activations = trace(task, layers, trial.training)
    found = dict(zip([n for n, _ in layers], layer_bytes(layers, activations, 5), strict=True))
    assert found["features.0"] == 4 * (16 * 3 * 5 * 5 + 16) + 4 * 5 * 16 * 16 * 16
    assert found["features.1"] == 0  # works in place
    assert found["features.2"] == 4 * 5 * 16 * 8 * 8
    assert found["classifier.6"] == 4 * (64 * 3 + 3) + 4 * 5 * 3


def times(forward_s, backward_s, copy_s):
    return LayerTimes(
        forward_s=forward_s, backward_s=backward_s, deferred_s=0.5, step_s=0.25,
        copy_s=copy_s,
    )  # fmt: skip


def test_costs_of_a_step_lie_on_the_layers_that_a_stage_can_begin_with():
    profile = LayerProfile([0, 2], [times(1, 2, 0.125), times(3, 4, 9)], 4, replicas=2)
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
