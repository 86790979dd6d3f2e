"""Fake tensors: they have shapes and types but no memory, so models pass without computing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call

if TYPE_CHECKING:
    from collections.abc import Iterable


def fake_mode_of(modules: Iterable[nn.Module]) -> FakeTensorMode:
    """Return the mode of the modules' own fake parameters, or a new one that takes real ones."""
    for module in modules:
        for parameter in module.parameters():
            if isinstance(parameter, FakeTensor):
                return parameter.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def as_fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Return a fake tensor like `tensor`.

    The mode's own conversion, explicit or in an operation, imports torch's compiler.
    """
    if isinstance(tensor, FakeTensor):
        return tensor
    with mode:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )


def call_fake(mode: FakeTensorMode, module: nn.Module, inputs: Tensor) -> Any:
    """Call a module with fake parameters and buffers in place of its own."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    fake = {name: as_fake(mode, tensor) for name, tensor in tensors}
    with mode:
        return functional_call(module, fake, (inputs,))
