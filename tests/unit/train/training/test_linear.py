"""Parameters in linear layers."""

from __future__ import annotations

from torch import nn

from paceline.train.training.tensors import linear_parameters


def test_shared_parameters_count_once_and_other_layers_do_not() -> None:
    first, second = nn.Linear(3, 4), nn.Linear(3, 4, bias=False)
    second.weight = first.weight
    assert linear_parameters(nn.Sequential(nn.Conv2d(1, 1, 3), first, second)) == 3 * 4 + 4
