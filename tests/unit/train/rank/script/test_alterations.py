"""Scripts draw equal random numbers, or none, while they are altered."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.plan.trials.trial import Alterations
from paceline.train.rank.script.alterations import Start, altering

ONES = torch.ones(4, 6, 8)


def test_a_seed_reaches_every_generator():
    def drawn() -> tuple[float, float, float]:
        with altering(Alterations(seed=3)):
            return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert drawn() == drawn()


class DropPath(nn.Module):
    def forward(self, inputs):
        return inputs * torch.rand(()) if self.training else inputs


@pytest.mark.parametrize(
    "drop",
    [
        nn.Dropout(0.5),
        nn.Dropout1d(0.5),
        nn.AlphaDropout(0.5),
        DropPath(),
        lambda inputs: functional.dropout(inputs, p=0.5),
        lambda inputs: torch.dropout(inputs, 0.5, True),
    ],
)
def test_dropout_is_identity(drop):
    with altering(Alterations(no_dropout=True)):
        assert torch.equal(drop(ONES), ONES)


@pytest.mark.parametrize(
    "layer",
    [
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True),
        nn.LSTM(8, 8, 2, dropout=0.5),
        lambda inputs: functional.scaled_dot_product_attention(
            inputs, inputs, inputs * torch.arange(6.0)[:, None], dropout_p=0.5
        ),
    ],
)
def test_attention_and_recurrent_layers_drop_nothing(layer):
    def output():
        found = layer(ONES)
        return found if isinstance(found, torch.Tensor) else found[0]

    with altering(Alterations(no_dropout=True)):
        assert torch.equal(output(), output())


def test_dropout_is_restored_at_the_end():
    with altering(Alterations(no_dropout=True)):
        pass
    assert not torch.equal(nn.Dropout(0.5)(ONES), ONES)


def trained(start, tied=False):
    """Call two models, the second one with a buffer, after a part of the first; return both."""
    first = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    second = nn.BatchNorm1d(3)
    nn.init.normal_(second.running_mean)
    if tied:
        first[1].weight = first[0].weight
    with altering(Alterations(same_start=True), start):
        first[0](torch.ones(2, 3))
        first(torch.ones(2, 3))
        with torch.no_grad():
            first[0].weight.zero_()  # a step
        second(torch.ones(2, 3))
        first(torch.ones(2, 3))
    return first, second


@pytest.mark.parametrize("tied", [False, True])
def test_a_training_starts_with_the_weights_and_buffers_of_another(tmp_path, tied):
    file = tmp_path / "start.safetensors"
    first, second = trained(Start(file, is_reference=True, writes=True), tied)
    again, other = trained(Start(file, is_reference=False, writes=False), tied)
    assert torch.equal(first[1].bias, again[1].bias)
    assert torch.equal(first[1].weight, again[1].weight)
    assert torch.equal(second.running_mean, other.running_mean)
    assert not again[0].weight.any(), "only the start is equal"


def test_tensors_that_the_reference_does_not_have_keep_their_values(tmp_path):
    file = tmp_path / "start.safetensors"
    trained(Start(file, is_reference=True, writes=True))
    wide = nn.Linear(4, 4)
    before = wide.weight.clone()
    with altering(Alterations(), Start(file, is_reference=False, writes=False)):
        wide(torch.ones(1, 4))
    assert torch.equal(wide.weight, before)
