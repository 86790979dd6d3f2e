from __future__ import annotations

import pytest
import torch
from tests.support.models import TINY_VGG
from tests.unit.strategies.pipeline.node import layers_of, pipeline_trial

from paceline.strategies.pipeline.split_points import Activation, layer_bytes, trace
from paceline.training.dropout import set_sample_keys
from paceline.training.passes import autocast
from paceline.workloads.build import build_model, make_task


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
