"""Alter what a script cannot be asked for, so that it can be compared with its reference.

Both then draw equal random numbers, or none, or start with equal weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import UninitializedParameter

from paceline.base.torch_internals.fsdp import FlatParameter
from paceline.plan.trials.trial import Alterations
from paceline.train.rank.script.modules import (
    CalledModules,
    flat_parameters,
    named_buffers,
    parameter_names,
)
from paceline.train.rank.script.phases import hooked, replaced
from paceline.train.rank.script.tensors import whole
from paceline.train.training.tensors import save_tensors

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


class Start:
    """Weights and buffers of models before their first call: kept by the reference in a file, from
    which other trainings take them.

    writes: this rank of the reference writes the file.
    """

    def __init__(self, file: Path, *, is_reference: bool, writes: bool) -> None:
        self._file, self._is_reference, self._writes = file, is_reference, writes
        self._tensors: dict[str, Tensor] = {}
        self._modules = CalledModules()
        self._known: set[int] = set()  # modules that were called, and those in them
        self._done: set[int] = set()  # tensors

    @contextmanager
    def equal(self) -> Iterator[None]:
        """Keep or take them while the context is active."""
        if not self._is_reference and self._file.exists():
            self._tensors = load_file(self._file)
        with (
            self._modules.noting(),
            hooked(register_module_forward_pre_hook(self._before_forward)),
        ):
            yield

    @torch.no_grad()
    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling() or id(module) in self._known:
            return
        self._known.update(map(id, module.modules()))
        models = self._modules.models()
        flat = [each for each in flat_parameters(models) if id(each.leaf) not in self._done]
        self._done.update(id(one) for each in flat for one in (each.leaf, *each.parameters))
        tensors = {**_parameters(models), **named_buffers(models)}
        own = {name: each for name, each in tensors.items() if id(each) not in self._done}
        self._done.update(map(id, own.values()))
        if self._is_reference:
            self._keep(own, flat)
        else:
            self._take(own, flat)

    def _keep(self, own: Mapping[str, Tensor], flat: Sequence[FlatParameter]) -> None:
        """Add tensors to the file; collective if they are sharded."""
        found = {name: whole(tensor.detach()) for name, tensor in own.items()}
        for each in flat:
            found.update(each.whole(Tensor.detach))
        self._tensors.update({name: each.clone() for name, each in found.items()})
        if self._writes:
            save_tensors(self._file, self._tensors)

    def _take(self, own: Mapping[str, Tensor], flat: Sequence[FlatParameter]) -> None:
        """Take tensors from the file; those that it does not have so keep their values."""
        for name, tensor in own.items():
            theirs = self._tensors.get(name)
            if theirs is not None and theirs.shape == tensor.shape:
                _set(tensor.detach(), theirs)
        for each in flat:
            each.take(self._tensors)


def _parameters(models: dict[str, nn.Module]) -> dict[str, Tensor]:
    """Return the parameters by name; those that are lazy have no values yet."""
    names = parameter_names(models)
    return {
        names[id(each)][0]: each
        for model in models.values()
        for each in model.parameters()
        if not isinstance(each, UninitializedParameter)
    }


def _set(tensor: Tensor, whole_value: Tensor) -> None:
    """Set a tensor, or this rank's part of it, without a message to other ranks."""
    if isinstance(tensor, DTensor):
        value = whole_value.to(tensor.device, tensor.dtype)
        mesh, placements = tensor.device_mesh, tensor.placements
        parts = distribute_tensor(value, mesh, placements, src_data_rank=None)
        tensor.to_local().copy_(parts.to_local())
    else:
        tensor.copy_(whole_value)


@contextmanager
def altering(alterations: Alterations, start: Start | None = None) -> Iterator[None]:
    """Alter a script that runs while the context is active. start: for the same start."""
    with ExitStack() as stack:
        if alterations.no_dropout:
            for name in _FUNCTIONS:
                stack.enter_context(replaced(functional, name, _identity))
            stack.enter_context(replaced(torch, "dropout", _identity))
            stack.enter_context(replaced(functional, _ATTENTION, _without_dropout))
            stack.enter_context(hooked(register_module_forward_pre_hook(_drop_nothing)))
        if start is not None:
            stack.enter_context(start.equal())
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
