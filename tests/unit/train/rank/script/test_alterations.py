"""Scripts draw equal random numbers, or none, while they are altered."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.plan.trials.trial import Alterations
from paceline.train.rank.script.alterations import altering

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
