from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.strategies.reduction.flat_layout import FlatLayout
from paceline.strategies.reduction.shared_sums import SharedGradients


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))


def outbox_of(layout, worker, workers):
    shares = layout.shards(workers)
    elements = SharedGradients.elements_needed(shares, worker)
    return SharedGradients(layout, shares, worker, torch.full((elements,), float("nan")))


@pytest.mark.parametrize(("worker", "workers"), [(0, 2), (1, 2), (1, 3)])
def test_backward_puts_what_others_own(model, worker, workers):
    parameters = dict(model.named_parameters())
    layout = FlatLayout.of(parameters.items())
    shared = outbox_of(layout, worker, workers)
    model(torch.ones(2, 6)).sum().backward()
    wanted = {name: p.grad.clone() for name, p in parameters.items()}
    model.zero_grad()
    shared.write_in_backward(parameters)
    model(torch.ones(2, 6)).sum().backward()
    for other in set(range(workers)) - {worker}:
        for piece in layout.shards(workers)[other]:
            flat = layout.in_storage_order(piece.name, wanted[piece.name])
            assert torch.equal(shared.read(piece), flat[piece.start : piece.stop])


@pytest.mark.parametrize(
    ("worker", "owned"), [(0, {"0.weight"}), (1, {"0.weight", "0.bias", "1.weight"})]
)
def test_gradients_of_which_the_worker_owns_nothing_are_dropped(model, worker, owned):
    parameters = dict(model.named_parameters())
    layout = FlatLayout.of(parameters.items())
    shared = outbox_of(layout, worker, 3)
    shared.write_in_backward(parameters)
    model(torch.ones(2, 6)).sum().backward()
    kept = {name for name, p in parameters.items() if p.grad is not None}
    # 60, 10, 30 and 3 elements are 4, 1, 2 and 1 lines, of which each of 3 workers has 2 or 3.
    assert kept == owned


def test_memory_is_as_large_as_what_others_own(model):
    layout = FlatLayout.of(model.named_parameters())
    shares = layout.shards(3)
    needed = [SharedGradients.elements_needed(shares, worker) for worker in range(3)]
    assert sum(needed) == 2 * sum(parameter.numel() for parameter in model.parameters())
    assert SharedGradients.elements_needed(layout.shards(1), 0) == 0


def test_boxes_of_part_of_a_model_count_from_its_start(model):
    parameters = dict(model.named_parameters())
    layout = FlatLayout.of(parameters.items()).only(["1.weight", "1.bias"])
    shared = outbox_of(layout, 0, 2)
    gradients = {name: torch.randn_like(parameters[name]) for name in layout.names}
    for name in layout.names:
        shared.write(name, gradients[name])
    piece = layout.shards(2)[1][0]
    flat = gradients[piece.name].flatten()
    assert torch.equal(shared.read(piece), flat[piece.start : piece.stop])
