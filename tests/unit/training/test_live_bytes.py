from __future__ import annotations

import torch
from torch import nn

from paceline.training.live_bytes import LiveBytes


def test_memory_of_tensors_is_counted_while_they_exist():
    with LiveBytes() as live:
        first = torch.zeros(1000)
        second = first * 2
        view = second[:10]
        assert live.now == 8000
        del first
        assert live.now == 4000
        del second
        assert live.now == 4000  # the view has the same memory
        del view
        assert live.now == 0
        assert live.peak == 8000
        live.reset_peak()
        assert live.peak == 0


def sizes(events):
    """Return +bytes of each allocation and -bytes of each release, in order."""
    known = {event.block: event.size for event in events if event.size is not None}
    return [known[e.block] if e.size is not None else -known[e.block] for e in events]


def test_views_of_what_exists_are_not_counted():
    layer = nn.Linear(50, 20, bias=False)
    inputs = torch.zeros(4, 50)
    with LiveBytes() as live, torch.no_grad():
        outputs = layer(inputs)  # by a transposed view of the weight
    assert (live.now, live.peak) == (outputs.nbytes, outputs.nbytes)


def test_convolution_copies_its_operands_and_then_its_result(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    layer = nn.Conv2d(9, 8, 1, bias=False)
    inputs = torch.zeros(2, 9, 4, 4)
    with LiveBytes() as live, torch.no_grad():
        outputs = layer(inputs)
    # 9 channels need two blocks of 8
    of_inputs, of_weight = 4 * 2 * 16 * 16, 4 * 8 * 16
    result = outputs.nbytes
    assert result == 4 * 2 * 8 * 16
    expected = [of_inputs, of_weight, result, -of_weight, -of_inputs, result, -result]
    assert sizes(live.events) == expected
    assert live.peak == of_inputs + of_weight + result
    assert live.now == result


def test_backward_pass_of_a_convolution_computes_one_gradient_after_the_other(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    layer = nn.Conv2d(8, 8, 1, bias=False)
    inputs = torch.zeros(2, 8, 4, 4, requires_grad=True)
    outputs = layer(inputs)
    with LiveBytes() as live:
        outputs.backward(torch.ones_like(outputs))
    images, weight = inputs.nbytes, layer.weight.nbytes
    to_inputs = [images, weight, images, -weight, -images, images, -images]
    to_weight = [images, images, weight, -images, -images, weight, -weight]
    found = sizes(live.events)
    start = found.index(weight) - 1  # after the ones
    assert found[start : start + 14] == to_inputs + to_weight


def test_first_layer_takes_images_as_they_are(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    layer = nn.Conv2d(3, 8, 1, bias=False)
    inputs = torch.zeros(2, 3, 4, 4)
    with LiveBytes() as live, torch.no_grad():
        outputs = layer(inputs)
    weight, result = 4 * 8 * 3, outputs.nbytes
    assert sizes(live.events) == [weight, result, -weight, result, -result]


def test_channels_last_needs_no_copies_of_activations():
    layer = nn.Conv2d(16, 16, 3, padding=1, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    inputs = torch.zeros(2, 16, 8, 8).to(memory_format=torch.channels_last)
    with LiveBytes() as live, torch.no_grad():
        outputs = layer(inputs)
    assert live.peak == outputs.nbytes
