"""Products of rows with each other, and sums over ranks, are found in the graph of a loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.train.rank.script.loss_terms import (
    is_not_linear_in,
    products,
    takes_numbers,
)

ROWS, RANKS = 6, 2
ROW = torch.arange(ROWS)


def mixes(loss):
    return any(each.mixes(ROWS, RANKS) for each in products(loss, 0))


def contrastive(first, second):
    pairs = functional.normalize(first) @ functional.normalize(second).T
    return functional.cross_entropy(pairs / 0.1, ROW)


LOSSES = {
    "contrastive": contrastive,
    "einsum": lambda a, b: functional.cross_entropy(torch.einsum("nc,mc->nm", a, b), ROW),
    "both views": lambda a, b: contrastive(a, torch.cat([a, b])),
    "distances": lambda a, b: torch.cdist(a, b).max(1).values.mean(),
    "distances of one": lambda a, _: functional.pdist(a).mean(),
    "differences": lambda a, b: (a[:, None] - b[None]).abs().sum(-1).amin(1).mean(),
    "ranking": lambda a, b: (b[:, 0] - a[:, :1] + 1).relu().mean(),
    "cross-correlation": lambda a, b: (a.T @ b / ROWS).square().sum(),
    "overlap": lambda a, b: 1 - 2 * (a * b).sum() / (a.sum() + b.sum()),
    "square of a mean": lambda a, _: a.softmax(1).mean(0).square().sum(),
    "entropy of a mean": lambda a, _: -(a.softmax(1).mean(0, True).log() * a.softmax(1)).sum(),
    "norm of all": lambda a, b: (a - b).norm(),
    "deviations": lambda a, _: (1 - a.std(dim=-2)).relu().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_compares_rows_mixes_them(name):
    encoder = nn.Sequential(nn.Conv1d(3, 4, 2), nn.Flatten(), nn.Linear(16, 7))
    views = torch.randn(2, ROWS, 3, 5)
    assert mixes(LOSSES[name](*map(encoder, views)))


def test_models_that_compute_each_row_by_itself_mix_none():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    low = nn.Parameter(torch.randn(8, ROWS)), nn.Parameter(torch.randn(ROWS, ROWS))
    positions = nn.Embedding(ROWS, 8)(ROW)
    hidden = layer(nn.Embedding(9, 8)(torch.arange(ROWS * 5).reshape(ROWS, 5) % 9))
    weights = low[0] @ low[1]  # a product of parameters
    pooled = hidden.mean(1) * hidden[:, :1].mean(-1)
    for output in (hidden.mean(1) @ weights, hidden.mean(1) @ positions.T, pooled):
        assert not mixes(functional.cross_entropy(output, ROW))
    tokens = torch.bmm(hidden, hidden.transpose(1, 2))
    assert not mixes(tokens.square().mean())


def test_sums_in_which_a_loss_is_linear_mix_no_rows():
    layer, weights = nn.Linear(5, 4), nn.Parameter(torch.randn(ROWS, 4))
    outputs, share = layer(torch.randn(ROWS, 5)), nn.Parameter(torch.ones(()))
    losses = functional.cross_entropy(outputs, ROW % 4, reduction="none")
    counts = torch.rand(ROWS)
    for loss in (
        (losses * counts).sum() / counts.sum(),
        losses.mean(0) * (-share).exp() + share,  # a learned weight
        losses.mean() + weights.square().sum() + weights.norm() + layer.weight.std(0).sum(),
        outputs.square().sum(1).sqrt().mean() - losses.sum() / ROWS,
        outputs.reshape(2, 3, 4).norm(dim=-1).mean(),
    ):
        assert not mixes(loss)


def test_a_square_of_a_sum_is_not_linear_in_it_and_a_mean_is():
    part = nn.Linear(3, 4)(torch.randn(ROWS, 3)).mean(0)
    assert is_not_linear_in(part.square().sum(), {part.grad_fn})
    assert not is_not_linear_in(part.sum() / 2 + 1, {part.grad_fn})
    assert not is_not_linear_in(nn.Linear(3, 1)(torch.ones(3)).sum().exp(), {part.grad_fn})


LET_THROUGH = {
    "clamp": lambda loss: loss.clamp(0, 5),
    "clamp by a tensor": lambda loss: loss.clamp(max=torch.tensor(5.0)),
    "at least": lambda loss: loss.clamp_min(0.5),
    "at most": lambda loss: torch.clamp_max(loss, 5),
    "hardtanh": lambda loss: functional.hardtanh(loss, 0, 5),
    "relu": torch.relu,
    "nan_to_num": torch.nan_to_num,
    "where": lambda loss: torch.where(loss.isfinite(), loss, torch.zeros(())),
}
LIMITED = {
    "clamp": lambda loss: loss.clamp(2, 5),
    "clamp by a tensor": lambda loss: loss.clamp(max=torch.tensor(0.5)),
    "at least": lambda loss: loss.clamp_min(1.0),  # no side of a bound
    "relu": lambda loss: (loss - 2).relu(),
    "nan_to_num": lambda loss: (loss / 0).nan_to_num(),
    "where": lambda loss: torch.where(loss > 2, loss, loss.square()),
    "of several": lambda loss: torch.stack([loss, loss * 9]).clamp(0, 5).sum(),
}


@pytest.mark.parametrize(
    ("function", "is_linear"),
    [(each, True) for each in LET_THROUGH.values()] + [(each, False) for each in LIMITED.values()],
    ids=[*(f"{name}, within" for name in LET_THROUGH), *(f"{name}, limited" for name in LIMITED)],
)
def test_bounds_that_a_loss_is_within_let_it_through(function, is_linear):
    loss = (nn.Parameter(torch.ones(ROWS)) * 1.0).mean()
    assert is_not_linear_in(function(loss), {loss.grad_fn}) is not is_linear


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, values):
        return values * 2

    @staticmethod
    def backward(_ctx, gradient):
        return gradient * 2


def test_a_function_of_a_loss_takes_a_number_and_one_of_rows_does_not():
    outputs = nn.Linear(3, 1)(torch.randn(ROWS, 3))
    loss = Doubled.apply(outputs.mean())
    assert takes_numbers(loss.grad_fn)
    assert not takes_numbers(Doubled.apply(outputs).grad_fn)
    assert not is_not_linear_in(loss / 2, [loss.grad_fn])
    assert is_not_linear_in(loss.square(), [loss.grad_fn])
