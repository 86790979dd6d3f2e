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


def test_convolution_counts_the_copies_of_its_operands(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    layer = nn.Conv2d(9, 8, 1, bias=False)
    inputs = torch.zeros(2, 9, 4, 4)
    with LiveBytes() as live, torch.no_grad():
        outputs = layer(inputs)
    assert live.peak_without_copies == outputs.nbytes == 4 * 2 * 8 * 16
    # 9 channels need two blocks of 8: inputs, weights, outputs
    assert live.peak == outputs.nbytes + 4 * (2 * 16 * 16 + 8 * 16) + outputs.nbytes


def test_channels_last_needs_no_copies_of_activations():
    layer = nn.Conv2d(16, 16, 3, padding=1, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    inputs = torch.zeros(2, 16, 8, 8).to(memory_format=torch.channels_last)
    with LiveBytes() as live, torch.no_grad():
        outputs = layer(inputs)
    assert live.peak == live.peak_without_copies == outputs.nbytes
