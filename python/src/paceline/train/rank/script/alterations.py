"""Alter what a script cannot be asked for, so that it can be compared with one process.

Ranks and the one process then draw equal random numbers, or none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook

from paceline.plan.trials.trial import Alterations
from paceline.train.rank.script.phases import hooked, replaced

_FUNCTIONS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)
_ATTENTION = "scaled_dot_product_attention"
# Layers of torchvision and timm that drop whole paths; they call no function of torch for it.
_PATHS = {"StochasticDepth", "DropPath"}


@contextmanager
def altering(alterations: Alterations) -> Iterator[None]:
    """Alter a script that runs while the context is active."""
    with ExitStack() as stack:
        if alterations.no_dropout:
            for name in _FUNCTIONS:
                stack.enter_context(replaced(functional, name, _identity))
            stack.enter_context(replaced(torch, "dropout", _identity))
            stack.enter_context(replaced(functional, _ATTENTION, _without_dropout))
            stack.enter_context(hooked(register_module_forward_pre_hook(_drop_nothing)))
        if alterations.seed is not None:  # last, so that nothing draws before the script
            random.seed(alterations.seed)
            np.random.seed(alterations.seed % 2**32)
            torch.manual_seed(alterations.seed)
        yield


def _identity(
    _function: Callable[..., Tensor],
    input: Tensor,  # noqa: A002  (torch calls it so)
    *_arguments: Any,
    **_named: Any,
) -> Tensor:
    return input


def _without_dropout(
    function: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    _dropout_p: float = 0.0,
    *arguments: Any,
    **named: Any,
) -> Tensor:
    named.pop("dropout_p", None)
    return function(query, key, value, attn_mask, 0.0, *arguments, **named)


def _drop_nothing(module: nn.Module, _inputs: Any) -> None:
    """Set a layer that drops inside of itself so that it keeps everything."""
    if isinstance(module, nn.RNNBase):
        module.dropout = 0.0
    elif type(module).__name__ in _PATHS:
        module.training = False
