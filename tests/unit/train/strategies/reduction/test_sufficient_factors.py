"""Layers that have factors, their interception, and gradients from factors."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from paceline.train.strategies.pipeline.deferred import is_deferred
from paceline.train.strategies.reduction.flat_layout import FlatLayout
from paceline.train.strategies.reduction.sufficient_factors import (
    LowPrecisionWeights,
    RowGradients,
    SharedFactors,
    capture,
    embedding_gradient,
    embeddings,
    linear_layers,
    rows_of,
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)
    )


def images(samples, seed=1):
    return torch.randn(samples, 1, 3, 3, generator=torch.Generator().manual_seed(seed))


def layers_of(model):
    return linear_layers(model, images(1))


def rows(model):
    return rows_of(layers_of(model))


def captured(layers, *low):
    """Return a dictionary that the next pass fills with its factors."""
    kept = {}
    capture(layers, lambda layer, *factors: kept.update({layer: factors}), *low)
    return kept


@pytest.mark.parametrize(
    "compute",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        partial(prune.l1_unstructured, name="weight", amount=0.5),
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
    ],
)
def test_layers_with_computed_weights_have_no_factors_and_are_not_deferred(compute):
    layer = compute(nn.Linear(8, 5))
    assert list(linear_layers(nn.Sequential(layer, nn.Linear(5, 3)), torch.zeros(1, 8))) == ["1"]
    assert not is_deferred(layer)


def test_linear_layers_leave_factors_instead_of_gradients(model):
    wanted = model[:2](images(4)).detach()
    kept = captured(layers_of(model))
    model(images(4)).sum().backward()
    assert set(kept) == {"2", "4"}
    assert torch.equal(kept["2"][0], wanted)
    assert torch.equal(kept["4"][1], torch.ones(4, 3))
    assert model[2].weight.grad is None
    assert model[4].bias.grad is None
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_rows_of_all_workers_are_the_gradient_over_all_replicas(model, workers):
    parts = [images(3, seed=1), images(2, seed=2)]
    model(torch.cat(parts)).square().sum().backward()
    wanted = {name: p.grad.flatten().clone() for name, p in model.named_parameters()}
    layout, of_rows = FlatLayout.of(model.named_parameters()), rows(model)
    factors, layers = [], layers_of(model)
    for part in parts:
        factors.append(captured(layers))
        model(part).square().sum().backward()
    found = {name: torch.full_like(wanted[name], float("nan")) for name in of_rows}
    for shards in layout.shards(workers, of_rows):
        row_gradients = RowGradients(layout, shards, of_rows)
        for shard in (s for s in shards if s.name in of_rows):
            found[shard.name][shard.start : shard.stop] = row_gradients.compute(shard, factors)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_factors_give_back_what_was_stored_in_the_step(model, dtype):
    layers = layers_of(model)
    most = dict.fromkeys(layers, 4)
    memory = torch.zeros(SharedFactors.bytes_needed(layers, most, dtype), dtype=torch.uint8)
    writer, reader = (SharedFactors(layers, most, dtype, memory) for _ in range(2))
    for samples in (4, 1, 3):
        stored = {
            name: (
                torch.randn(samples, layer.in_features).to(dtype),
                torch.randn(samples, layer.out_features).to(dtype),
            )
            for name, layer in layers.items()
        }
        writer.begin()
        for name, factors in stored.items():
            for start, end in ((0, 1), (1, samples)):  # two passes
                writer.store(name, *(factor[start:end] for factor in factors))
        found = reader.read()
        assert set(found) == set(stored)
        for name, factors in stored.items():
            assert all(map(torch.equal, found[name], factors))


def in_low_precision(model):
    """Return the layout of the model, and a copy of its linear layers' weights."""
    parameters = dict(model.named_parameters())
    layout = FlatLayout.of(parameters.items())
    flat = torch.zeros(layout.elements)
    layout.bind(parameters, flat, copy=True)
    return layout, LowPrecisionWeights(layout, flat, flat.to(torch.bfloat16), rows(model))


def test_low_precision_weights_follow_what_is_refreshed(model):
    layout, low = in_low_precision(model)
    assert torch.equal(low.of("2.weight"), model[2].weight.to(torch.bfloat16))
    first, second = layout.shards(2, rows(model))
    before = low.of("2.weight").clone()
    with torch.no_grad():
        model[2].weight.add_(1.0)
    low.refresh(first)
    assert torch.equal(low.of("2.weight")[:3], model[2].weight[:3].to(torch.bfloat16))
    assert torch.equal(low.of("2.weight")[3:], before[3:])
    low.refresh(second)
    assert torch.equal(low.of("2.weight"), model[2].weight.to(torch.bfloat16))


def test_passes_in_low_precision_are_those_of_autocast(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = model(images(4))
    _, low = in_low_precision(model)
    kept = captured(layers_of(model), low)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(images(4))
    found.float().sum().backward()
    assert torch.equal(found, wanted)
    assert {t.dtype for factors in kept.values() for t in factors} == {torch.bfloat16}


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
    embedding = nn.Embedding(7, 3, padding_idx=padding_idx)
    model = nn.Sequential(embedding, nn.Flatten())
    indices = torch.tensor([[1, 2, 2, 6, 0], [2, 5, 1, 1, 3]])
    wanted_output = model(indices)
    wanted_output.square().sum().backward()
    wanted, model[0].weight.grad = model[0].weight.grad, None
    factors = captured({"0": embedding})
    output = model(indices)
    assert torch.equal(output, wanted_output)
    output.square().sum().backward()
    assert model[0].weight.grad is None
    found = torch.full_like(wanted, float("nan"))
    rows, gradients = factors["0"]
    embedding_gradient(rows, gradients, padding_idx, found)
    torch.testing.assert_close(found, wanted)


def test_pass_without_gradients_keeps_no_factors():
    embedding = nn.Embedding(7, 3)
    model = nn.Sequential(embedding)
    capture({"0": embedding}, pytest.fail)
    with torch.no_grad():
        assert model(EXAMPLE).shape == (1, 5, 3)
