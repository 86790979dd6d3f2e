from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from paceline.train.strategies.pipeline.deferred import DeferredLinear, deferred


def passes(layer, inputs, bf16=False):
    """Forward and backward of each micro-batch; gradients of the inputs."""
    found = []
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        outputs = [layer(x) for x in inputs]
    for x, y in zip(inputs, outputs, strict=True):
        y.float().square().sum().backward()
        found.append(x.grad)
        x.grad = None
    return found


def inputs_of(*sizes):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(n, 6, generator=generator).requires_grad_() for n in sizes]


@pytest.fixture
def pair():
    torch.manual_seed(2)
    layer = nn.Linear(6, 4)
    return layer, DeferredLinear(copy.deepcopy(layer))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("sizes", [(3,), (2, 3, 1)])
def test_gradients_are_those_of_the_layer_itself(pair, sizes, bf16):
    plain, later = pair
    inputs = inputs_of(*sizes)
    expected = passes(plain, inputs, bf16)
    later.begin()
    found = passes(later, inputs, bf16)
    assert later.layer.weight.grad is None
    later.flush()
    tolerance = 0.02 if bf16 else 1e-6
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    for name in ("weight", "bias"):
        a, b = getattr(later.layer, name).grad, getattr(plain, name).grad
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_gradients_do_not_add_up_over_steps(pair):
    _, later = pair
    grads = []
    for _ in range(2):
        later.begin()
        passes(later, inputs_of(2, 2))
        later.flush()
        grads.append(later.layer.weight.grad.clone())
    assert torch.equal(*grads)


def test_step_without_samples_has_no_gradient(pair):
    _, later = pair
    later.begin()
    passes(later, inputs_of(2))
    later.flush()
    later.begin()
    later.flush()
    assert not later.layer.weight.grad.any()
    assert not later.layer.bias.grad.any()


def test_changed_weights_are_used_in_the_next_step_under_autocast(pair):
    _, later = pair
    x = inputs_of(2)[0]
    results = []
    for _ in range(2):
        later.begin()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(later(x).float())
        with torch.no_grad():
            later.layer.weight.mul_(2)
            later.layer.bias.mul_(2)
    torch.testing.assert_close(results[1], 2 * results[0], rtol=0.02, atol=0.02)


def test_photos_that_need_no_gradient_still_give_the_weights_theirs(pair):
    plain, later = pair
    x = inputs_of(3)[0].detach()
    plain(x).sum().backward()
    later.begin()
    later(x).sum().backward()
    later.flush()
    torch.testing.assert_close(later.layer.weight.grad, plain.weight.grad)


def test_layers_that_share_a_weight_add_to_its_gradient(pair):
    plain, later = pair
    twin = DeferredLinear(nn.Linear(6, 4))
    twin.layer.weight = later.layer.weight
    for step in range(2):
        plain.zero_grad()
        first, second = inputs_of(2 + step, 3)
        plain(torch.cat([first, second])).square().sum().backward()
        for layer in (later, twin):
            layer.begin()
        later(first).square().sum().backward()
        shifted = twin(second) - twin.layer.bias.detach() + later.layer.bias.detach()
        shifted.square().sum().backward()
        for layer in (later, twin):
            layer.flush()
        torch.testing.assert_close(later.layer.weight.grad, plain.weight.grad)
        torch.testing.assert_close(later.layer.bias.grad + twin.layer.bias.grad, plain.bias.grad)


def test_gradient_of_another_layer_with_the_weight_is_kept(pair):
    _, later = pair
    embedding = nn.Embedding(4, 6)
    embedding.weight = later.layer.weight
    for _ in range(2):
        later.begin()
        embedding(torch.tensor([1])).sum().backward()
        later(torch.zeros(1, 6)).sum().backward()
        later.flush()
        wanted = torch.zeros(4, 6).index_fill(0, torch.tensor([1]), 1)
        assert torch.equal(later.layer.weight.grad, wanted)


def test_layer_without_bias():
    later = DeferredLinear(nn.Linear(6, 4, bias=False))
    later.begin()
    x = inputs_of(3)[0]
    later(x).sum().backward()
    later.flush()
    torch.testing.assert_close(later.layer.weight.grad, x.detach().sum(0).expand(4, 6))


def test_repeated_passes_count_as_often(pair):
    _, later = pair
    grads = []
    for times in (1, 3):
        later.begin()
        passes(later, inputs_of(2))
        later.repeat(times)
        later.flush()
        grads.append(later.layer.weight.grad.clone())
    torch.testing.assert_close(grads[1], 3 * grads[0])


def test_other_layers_stay_as_they_are():
    layer = nn.ReLU()
    assert deferred(layer) is layer
    assert isinstance(deferred(nn.Linear(2, 2)), DeferredLinear)
