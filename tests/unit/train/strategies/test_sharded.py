"""Units of a model: no parameter is used outside of the calls of its unit."""

from __future__ import annotations

import pytest
import torch
from tests.unit.train.strategies.own_models import Tied, Transformer
from torch import nn
from torch.nn.functional import linear

from paceline.base.errors import UsageError
from paceline.train.strategies.sharded import find_units
from paceline.train.training.task import TaskSettings
from paceline.train.workloads.build import build_model


def names_of_units(model, example):
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(unit)] for unit in find_units(model, example)]


def chain(layers, width=16):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def test_layers_of_a_chain_are_units():
    assert names_of_units(chain(3), torch.zeros(1, 16)) == ["0", "1", "2"]


def test_part_of_a_large_model_is_one_unit_and_a_tiny_layer_none():
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(40)]
    model = nn.Sequential(*blocks, nn.LayerNorm(64))
    assert names_of_units(model, torch.zeros(1, 64)) == [str(number) for number in range(40)]


def test_large_part_is_divided():
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    assert names_of_units(model, torch.zeros(1, 64)) == ["0.0", "0.2"]


def test_attention_is_one_unit_because_it_does_not_call_its_own_layer():
    task = Transformer(TaskSettings(classes=3, image_size=32))
    names = names_of_units(build_model(task), torch.zeros(1, 3, 32, 32))
    assert "3.attention" in names
    assert "3.attention.out_proj" not in names


def test_tied_weights_are_in_no_unit():
    task = Tied(TaskSettings(classes=3, image_size=32))
    model = build_model(task)
    units = find_units(model, task.example_input())
    shared = [p for n, p in model.named_parameters(remove_duplicate=False)]
    tied = {id(p) for p in shared if sum(p is other for other in shared) > 1}
    assert tied
    assert not tied & {id(p) for unit in units for p in unit.parameters()}


class Borrows(nn.Module):
    """Uses the weight of a layer that it does not call at that time."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, inputs):
        return linear(self.second(self.first(inputs)), self.first.weight)


def test_layer_whose_weight_another_one_uses_is_no_unit():
    assert names_of_units(Borrows(), torch.zeros(1, 16)) == ["second"]


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs):
        return self.layer(inputs) if float(inputs.sum()) > 0 else inputs


def test_model_that_needs_values_is_refused_with_the_reason():
    with pytest.raises(UsageError, match="tensors without memory, which failed"):
        find_units(Decides(), torch.zeros(1, 4))


def test_search_leaves_the_model_as_it_was():
    model = chain(2).train()
    before = dict(model.named_parameters())
    find_units(model, torch.zeros(1, 16))
    assert all(before[name] is p for name, p in model.named_parameters())
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
