import pytest
import torch
from torch import Tensor, nn

from paceline.strategies.reduction.factor_layers import (
    capture,
    embedding_gradient,
    embeddings,
)

EXAMPLE = torch.zeros(1, 5, dtype=torch.int64)


class Tied(nn.Module):
    """An embedding whose table is also the output layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, inputs):
        return self.head(self.table(inputs))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)

    def forward(self, inputs):
        return self.table(inputs) + self.table(inputs)


def test_indices_of_one_sample_are_counted():
    model = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(15, 2))
    assert embeddings(model, EXAMPLE) == {"0": 5}


@pytest.mark.parametrize(
    "model",
    [
        Tied(),
        Twice(),
        nn.Embedding(7, 3, max_norm=1.0),
        nn.Embedding(7, 3, scale_grad_by_freq=True),
        nn.Embedding(7, 3, sparse=True),
        nn.Embedding(7, 3).requires_grad_(False),
    ],
)
def test_embedding_whose_gradient_is_more_than_its_factors_is_left_out(model):
    assert embeddings(nn.Sequential(model), EXAMPLE) == {}


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_gradient_from_factors_is_that_of_the_embedding(padding_idx):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 3, padding_idx=padding_idx), nn.Flatten())
    indices = torch.tensor([[1, 2, 2, 6, 0], [2, 5, 1, 1, 3]])
    wanted_output = model(indices)
    wanted_output.square().sum().backward()
    wanted, model[0].weight.grad = model[0].weight.grad, None
    factors: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str, indices: Tensor, gradients: Tensor) -> None:
        factors[name] = indices, gradients

    capture({"0": model[0]}, keep)
    output = model(indices)
    assert torch.equal(output, wanted_output)
    output.square().sum().backward()
    assert model[0].weight.grad is None
    found = torch.full_like(wanted, float("nan"))
    embedding_gradient(*factors["0"], padding_idx, found)
    torch.testing.assert_close(found, wanted)


def test_pass_without_gradients_keeps_no_factors():
    model = nn.Sequential(nn.Embedding(7, 3))
    capture({"0": model[0]}, pytest.fail)
    with torch.no_grad():
        assert model(EXAMPLE).shape == (1, 5, 3)
