"""Layouts of an example in one process; several ranks: tests/functional/test_verify.py."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

_FILE = Path(__file__).parents[2] / "examples/scripts/distribute.py"
layouts = SimpleNamespace(**runpy.run_path(str(_FILE)))


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def test_one_process_keeps_its_module():
    model = network()
    assert layouts.distribute(model, "ddp") is model


def test_activations_are_computed_again_with_the_same_gradient():
    plain, again = network(), network()
    layouts.distribute(again, "fsdp+checkpoint")
    calls = []
    again[0].register_forward_hook(lambda *_: calls.append(None))
    for model in (plain, again):
        model(torch.ones(3, 4)).sum().backward()
    assert torch.equal(plain[0].weight.grad, again[0].weight.grad)


def test_blocks_are_those_of_the_longest_list():
    blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    model = nn.ModuleDict({"head": nn.Sequential(nn.Linear(2, 2)), "blocks": blocks})
    assert layouts.blocks_of(model) == list(blocks)
    assert len(layouts.blocks_of(network())) == 2  # Tanh has no parameters


@pytest.mark.parametrize("layout", ["dpp", "ddp+fast", ""])
def test_an_unknown_layout_names_those_that_exist(layout):
    with pytest.raises(ValueError, match=r"expected one of ddp, fsdp, hsdp:N, tp, pipeline:M, and"):
        layouts.distribute(network(), layout)


def test_a_pipeline_has_no_modifiers():
    with pytest.raises(ValueError, match="without modifiers"):
        layouts.distribute(network(), "pipeline+compile")


def test_the_gradient_of_a_plain_module_is_that_of_its_loss():
    plain, model = network(), network()
    inputs, targets = torch.ones(3, 4), torch.zeros(3, 2)
    expected = nn.functional.mse_loss(plain(inputs), targets)
    expected.backward()
    loss = layouts.forward_backward(model, inputs, targets, nn.functional.mse_loss)
    assert torch.equal(loss, expected)
    assert not loss.requires_grad
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.blocks[1].weight = self.blocks[0].weight


@pytest.mark.parametrize(
    ("model", "parts", "example", "message"),
    [
        (network(), 2, None, "an example"),
        (network(), 1, torch.ones(4, 4), "at least 2 micro-batches"),
        (network(), 0, torch.ones(4, 4), "at least 2 micro-batches"),
        (network(), 3, torch.ones(4, 4), "a batch that 3 micro-batches divide"),
        (nn.Sequential(nn.Linear(4, 4)), 2, torch.ones(4, 4), "at least 2 blocks, the model has 1"),
        (Tied(), 2, torch.ones(4, 4), "no tied parameters"),
    ],
)
def test_what_does_not_fit_a_pipeline_is_refused(model, parts, example, message):
    with pytest.raises(ValueError, match=f"pipeline:{parts}: expected {message}"):
        layouts.check_pipeline(model, f"pipeline:{parts}", parts, 2, example)


def test_stages_begin_at_equal_parts_of_the_blocks():
    blocks = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(2, 2) for _ in range(7))})
    assert layouts.first_blocks(blocks, 3) == ["blocks.2", "blocks.4"]
