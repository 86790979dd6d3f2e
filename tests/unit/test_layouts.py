"""Layouts of a module in one process; several ranks: tests/functional/test_verify.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import UsageError
from paceline.layouts import blocks_of, distribute


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def test_one_process_keeps_its_module():
    model = network()
    assert distribute(model, "ddp") is model
    assert paceline.layouts.distribute is distribute


def test_activations_are_computed_again_with_the_same_gradient():
    plain, again = network(), network()
    distribute(again, "fsdp+checkpoint")
    calls = []
    again[0].register_forward_hook(lambda *_: calls.append(None))
    for model in (plain, again):
        model(torch.ones(3, 4)).sum().backward()
    assert torch.equal(plain[0].weight.grad, again[0].weight.grad)


def test_blocks_are_those_of_the_longest_list():
    blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    model = nn.ModuleDict({"head": nn.Sequential(nn.Linear(2, 2)), "blocks": blocks})
    assert blocks_of(model) == list(blocks)
    assert len(blocks_of(network())) == 2  # Tanh has no parameters


@pytest.mark.parametrize("layout", ["dpp", "ddp+fast", ""])
def test_an_unknown_layout_names_those_that_exist(layout):
    with pytest.raises(UsageError, match=r"expected one of ddp, fsdp, hsdp:N, tp, and modifiers"):
        distribute(network(), layout)
