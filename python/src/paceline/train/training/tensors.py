"""Weights and gradients as files, checksums and norms; a linear layer in two halves.

The gradient of a layer's input is computed now, that of its weight later. It is a product of the
layer's inputs and the gradients of its outputs (its sufficient factors), which together are much
smaller than the weight if there are few samples. With these factors it can be computed once for
several passes, or only for some rows.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear

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


def linear_parameters(model: nn.Module) -> int:
    """Return the number of parameters in linear layers; shared ones count once."""
    layers = (module for module in model.modules() if isinstance(module, nn.Linear))
    return sum(p.numel() for p in {p for layer in layers for p in layer.parameters()})


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether it is an nn.Linear whose weight is a parameter, not computed from others."""
    return type(module) is nn.Linear and isinstance(module.weight, nn.Parameter)


def linear_that_keeps(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, keep: Callable[[Tensor, Tensor], object]
) -> Tensor:
    """Return inputs @ weight.T + bias, shape (..., outputs). Its backward pass computes the
    gradient of `inputs` only, and calls `keep` with the inputs and the gradients of the outputs,
    each as a matrix with one row per sample, or per sample and position.

    All operands have the same dtype.
    """
    if not torch.is_grad_enabled():
        return linear(inputs, weight, bias)
    if not inputs.requires_grad:  # otherwise autograd would skip this layer
        inputs = inputs.detach().requires_grad_()
    output: Tensor = _InputGradient.apply(inputs, weight, bias, keep)  # type: ignore[no-untyped-call]
    return output


def weight_gradient(inputs: Tensor, outputs_gradients: Tensor, out: Tensor) -> None:
    """Compute outputs_gradients.T @ inputs as one product into float32 `out`.

    inputs: shape (samples, inputs); outputs_gradients: (samples, rows); out: (rows, inputs).
    """
    if inputs.dtype == out.dtype:
        torch.mm(outputs_gradients.t(), inputs, out=out)
    else:
        out.copy_(outputs_gradients.t() @ inputs)


def bias_gradient(outputs_gradients: Tensor, out: Tensor) -> None:
    """Sum over the samples into float32 `out`, shape (rows,)."""
    torch.sum(outputs_gradients, 0, dtype=out.dtype, out=out)


def joined(parts: list[Tensor]) -> Tensor:
    """Concatenate the samples of several passes; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _InputGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        keep: Callable[[Tensor, Tensor], object],
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.keep = keep
        return linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        inputs, weight = ctx.saved_tensors
        (outputs_gradients,) = gradients
        ctx.keep(inputs.detach().flatten(0, -2), outputs_gradients.flatten(0, -2))
        return outputs_gradients @ weight, None, None, None
