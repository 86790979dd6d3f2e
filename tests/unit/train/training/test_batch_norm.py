"""Normalisation over all replicas, against torch's own layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from paceline.train.training.batch_norm import synchronise

INPUTS = {
    "vectors": (nn.BatchNorm1d, (8, 5)),
    "series": (nn.BatchNorm1d, (8, 5, 7)),
    "images": (nn.BatchNorm2d, (4, 6, 5, 5)),
    "volumes": (nn.BatchNorm3d, (2, 3, 4, 4, 4)),
}
OPTIONS = [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}]


def trained(layer, inputs, gradient):
    """Return outputs, the inputs' gradient, parameters' gradients and buffers after one pass."""
    inputs = inputs.clone().requires_grad_()
    outputs = layer(inputs)
    outputs.backward(gradient)
    parameters = [parameter.grad for parameter in layer.parameters()]
    return [outputs.detach(), inputs.grad, *parameters, *layer.buffers()]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_one_replica_normalises_as_torch_does(name, options, channels_last):
    kind, shape = INPUTS[name]
    torch.manual_seed(1)
    expected = kind(shape[1], **options)
    for parameter in expected.parameters():
        nn.init.normal_(parameter)
    found = copy.deepcopy(expected)
    inputs, gradient = 20 + torch.randn(shape), torch.randn(shape)
    if channels_last:
        inputs, gradient = (
            each.transpose(1, -1).contiguous().transpose(1, -1) for each in (inputs, gradient)
        )
    synchronise(found, lambda values: values, "global")
    pairs = zip(trained(found, inputs, gradient), trained(expected, inputs, gradient), strict=True)
    for own, of_torch in pairs:
        torch.testing.assert_close(own, of_torch, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_low_precision_are_not_rounded_to_it(dtype):
    torch.manual_seed(1)
    expected = nn.BatchNorm2d(6)
    found = copy.deepcopy(expected)
    inputs, gradient = (torch.randn(4, 6, 5, 5).to(dtype) for _ in range(2))
    synchronise(found, lambda values: values, "global")
    own, of_torch = trained(found, inputs, gradient), trained(expected, inputs, gradient)
    assert own[0].dtype == own[1].dtype == dtype
    torch.testing.assert_close(
        own[1], of_torch[1], rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps
    )
    for one, other in zip(own[2:], of_torch[2:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_single_value_of_a_channel_leaves_finite_statistics():
    """The last batch of an epoch may have one sample; torch's own layer refuses it."""
    layer = nn.BatchNorm1d(1)
    synchronise(layer, lambda values: values, "global")
    assert layer(torch.full((1, 1), 5.0)).item() == 0.0
    assert layer.running_mean.item() == pytest.approx(0.5)
    assert layer.running_var.item() == pytest.approx(0.9)
