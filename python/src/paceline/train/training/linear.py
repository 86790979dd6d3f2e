"""A linear layer in two halves: the gradient of its input now, the gradient of its weight later.

The gradient of a weight is a product of the layer's inputs and the gradients of its outputs (its
sufficient factors), which together are much smaller than the weight if there are few samples. With
these factors the gradient can be computed once for several passes, or only for some rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


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
