"""Fake tensors: they have shapes and types but no memory, so models pass without computing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from paceline.base.torch_internals import FakeTensor, FakeTensorMode


def fake_mode() -> FakeTensorMode:
    """Return a mode whose operations also take real tensors."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def as_fake(mode: FakeTensorMode, tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a fake tensor like `tensor`, on another device if one is given.

    The mode's own conversion, explicit or in an operation, imports torch's compiler.
    """
    if isinstance(tensor, FakeTensor):
        return tensor
    with mode:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device
        )


def call_fake(
    mode: FakeTensorMode, module: nn.Module, inputs: Tensor, device: torch.device | None = None
) -> Any:
    """Evaluate a module with fake parameters and buffers in place of its own, without a graph.

    device: of all fake tensors; None means that of each tensor.
    """
    tensors = (*module.named_parameters(), *module.named_buffers())
    fake = {name: as_fake(mode, tensor, device) for name, tensor in tensors}
    inputs = as_fake(mode, inputs, device)
    with mode, evaluating(module), torch.no_grad():
        return functional_call(module, fake, (inputs,))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch the model to evaluation, without dropout masks and batch statistics, and back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training
