"""What autograd's graph of a loss shows."""

from __future__ import annotations

import torch
from torch import nn

from paceline.train.rank.script.loss_terms import is_not_linear_in


def test_a_square_of_a_sum_is_not_linear_in_it_and_a_mean_is():
    part = nn.Linear(3, 4)(torch.randn(6, 3)).mean(0)
    assert is_not_linear_in(part.square().sum(), {part.grad_fn})
    assert not is_not_linear_in(part.sum() / 2 + 1, {part.grad_fn})
    assert not is_not_linear_in(nn.Linear(3, 1)(torch.ones(3)).sum().exp(), {part.grad_fn})
