from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.train.strategies.reduction.flat_layout import FlatLayout
from paceline.train.strategies.reduction.shared_sums import SharedGradients


@pytest.mark.parametrize(
    ("worker", "owned", "needed"),
    [(0, {"0.weight"}, 38 + 17), (1, {"0.weight", "0.bias", "1.weight"}, 48 + 17)],
)
def test_gradients_of_which_the_worker_owns_nothing_are_dropped(worker, owned, needed):
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
    parameters = dict(model.named_parameters())
    layout = FlatLayout.of(parameters.items())
    # 60, 10, 30 and 3 elements are 4, 1, 2 and 1 lines; the workers own 48, 38 and 17 elements.
    shards = layout.shards(3)
    elements = SharedGradients.elements_needed(shards, worker)
    assert elements == needed
    shared = SharedGradients(layout, shards, worker, torch.empty(elements))
    shared.write_in_backward(parameters)
    model(torch.ones(2, 6)).sum().backward()
    assert {name for name, p in parameters.items() if p.grad is not None} == owned
