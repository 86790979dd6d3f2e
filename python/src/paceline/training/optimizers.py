"""The optimiser, the same for every strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from paceline.plan.trial import Training


def make_optimizer(parameters: Iterable[Tensor], training: Training) -> torch.optim.Optimizer:
    """Return SGD with momentum, fused into one pass over the parameters."""
    return torch.optim.SGD(
        list(parameters), lr=training.learning_rate, momentum=training.momentum, fused=True
    )
