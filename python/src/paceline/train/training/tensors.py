"""Weights and gradients as files, checksums and norms; identity of their memory."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call

from paceline.base.torch_internals import FakeTensor, FakeTensorMode

_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # of Rust


def sha256_of(tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum over names, types, shapes and bytes in order, independent of the memory
    format."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.numpy().data)
    return digest.hexdigest()


def sha256_by_name(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the checksum of each tensor."""
    return {name: sha256_of({"": tensor}) for name, tensor in tensors.items()}


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, under its final name only when it is complete. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    try:
        save_file(_separate(tensors), temporary)
        temporary.replace(path)
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors; copy those that share memory with another, as tied weights do."""
    separate: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().contiguous()
        if own.data_ptr() in places and own.numel():
            own = own.clone()
        places.add(own.data_ptr())
        separate[name] = own
    return separate


def update_l2(final: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the L2 norm of (final - initial) for each tensor."""
    return {
        name: float(torch.linalg.vector_norm((final[name] - initial[name]).detach().double()))
        for name in final
    }


# --- fake tensors: they have shapes and types but no memory, so models pass without computing ----


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
