"""Fake tensors: they have shapes and types but no memory, so models pass without computing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

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
    """Return a fake tensor like `tensor`."""
    return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)
