"""Layers that have sufficient factors, and the interception of their passes.

The gradient of a linear layer's weight is (gradients of outputs).T @ inputs. Its two operands are
called sufficient factors. The gradient of an embedding has as many rows as the table, of which a
step changes only those that it looked up: the indices and the gradients of the outputs determine
it. Factors are smaller than the gradient if the layer is large and the samples are few. (Xie et
al.: Lighter-Communication Distributed Machine Learning via Sufficient Factor Broadcasting, UAI
2016; Zhang et al.: Poseidon, USENIX ATC 2017.)
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from paceline.training.fake_tensors import input_shapes
from paceline.training.linear import is_plain_linear, linear_that_keeps
from paceline.training.recomputation import once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from paceline.strategies.reduction.sufficient_factors import LowPrecisionWeights

FactorLayer = nn.Linear | nn.Embedding


def linear_layers(model: nn.Module, example: Tensor) -> dict[str, nn.Linear]:
    """Return the linear layers that have sufficient factors, by name.

    Such a layer has one row per sample, is called once in a pass, and has parameters of its own
    that are all trained. Layers of sequences have more rows than factors would save; tied weights
    and layers whose weights another module uses (nn.MultiheadAttention) get gradients from
    elsewhere, too.
    example: an input of one sample.
    """
    own = _users(model)
    found = {
        name: module
        for name, module in model.named_modules()
        if is_plain_linear(module) and all(own[p] == 1 for p in module.parameters())
    }
    calls = input_shapes(model, found, example) if found else {}
    return {n: found[n] for n, shapes in calls.items() if [s[:-1] for s in shapes] == [(1,)]}


def embeddings(model: nn.Module, example: Tensor) -> dict[str, int]:
    """Return the number of indices of one sample for each embedding with sufficient factors.

    Such an embedding is called once in a pass, is trained, shares its table with no other module,
    and changes neither table nor gradients (max_norm, scale_grad_by_freq, sparse). example: an
    input of one sample.
    """
    own = _users(model)
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Embedding
        and own[module.weight] == 1
        and module.max_norm is None
        and not (module.scale_grad_by_freq or module.sparse)
    }
    calls = input_shapes(model, found, example) if found else {}
    return {name: shapes[0].numel() for name, shapes in calls.items() if len(shapes) == 1}


def _users(model: nn.Module) -> Counter[Tensor]:
    """Return the number of modules that use each trained parameter."""
    named = model.named_parameters(remove_duplicate=False)
    return Counter(parameter for _, parameter in named if parameter.requires_grad)


def rows_of(layers: Mapping[str, nn.Linear]) -> dict[str, int]:
    """Return the number of rows of each parameter of linear layers, by the name of the
    parameter."""
    return {
        f"{name}.{own}": layer.out_features
        for name, layer in layers.items()
        for own, _ in layer.named_parameters()
    }


def parameter_names(layers: Iterable[tuple[str, nn.Module]]) -> frozenset[str]:
    """Return the names of the parameters of layers in their model."""
    return frozenset(f"{name}.{p}" for name, layer in layers for p, _ in layer.named_parameters())


def capture(
    layers: Mapping[str, FactorLayer],
    store: Callable[[str, Tensor, Tensor], object],
    low_precision: LowPrecisionWeights | None = None,
    store_inputs: Callable[[str, Tensor], object] | None = None,
) -> None:
    """Make backward passes give the factors of each layer to `store` with the name of the layer,
    instead of setting the gradients of its parameters.

    store_inputs: gets the inputs of linear layers in the forward pass. Only `forward` of a layer is
    replaced: it keeps names and hooks.
    """
    forward: Callable[[Tensor], Tensor]
    for name, layer in layers.items():
        keep = partial(store, name)
        if isinstance(layer, nn.Embedding):
            forward = partial(_look_up, layer, keep)
        else:
            keep_inputs = None if store_inputs is None else partial(store_inputs, name)
            weight = None if low_precision is None else low_precision.of(f"{name}.weight")
            forward = partial(_multiply, layer, keep, keep_inputs, weight)
        layer.forward = forward  # type: ignore[method-assign]


def _multiply(
    layer: nn.Linear,
    keep: Callable[[Tensor, Tensor], object],
    keep_inputs: Callable[[Tensor], object] | None,
    low_precision: Tensor | None,
    inputs: Tensor,
) -> Tensor:
    """Compute a linear layer. low_precision: its weight in the precision of autocast."""
    weight = layer.weight.detach()
    if low_precision is not None:
        weight = low_precision
    elif torch.is_autocast_enabled("cpu"):
        weight = weight.to(torch.get_autocast_dtype("cpu"))
    inputs = inputs.to(weight.dtype)
    own_bias: Tensor | None = layer.bias
    bias = None if own_bias is None else own_bias.detach().to(weight.dtype)
    if keep_inputs is not None and torch.is_grad_enabled():
        once(lambda: keep_inputs(inputs.detach().flatten(0, -2)))
    with torch.autocast("cpu", enabled=False):  # all operands already have their precision
        return linear_that_keeps(inputs, weight, bias, keep)


def _look_up(
    layer: nn.Embedding, keep: Callable[[Tensor, Tensor], object], indices: Tensor
) -> Tensor:
    weight = layer.weight.detach()
    if not torch.is_grad_enabled():
        return embedding(indices, weight, layer.padding_idx)
    # Autograd skips a function whose inputs need no gradient.
    anchor = weight.new_empty(0).requires_grad_()
    output: Tensor = _Lookup.apply(anchor, indices, weight, keep)  # type: ignore[no-untyped-call]
    return output


def embedding_gradient(
    indices: Tensor, outputs_gradients: Tensor, padding_idx: int | None, out: Tensor
) -> None:
    """Add the rows of `outputs_gradients`, shape (rows, width), at `indices`, shape (rows, 1)."""
    out.zero_().index_add_(0, indices[:, 0], outputs_gradients)
    if padding_idx is not None:
        out[padding_idx] = 0


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,  # noqa: ARG004
        indices: Tensor,
        weight: Tensor,
        keep: Callable[[Tensor, Tensor], object],
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.keep = keep
        return embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None]:
        (indices,) = ctx.saved_tensors
        (outputs_gradients,) = gradients
        width = outputs_gradients.shape[-1]
        ctx.keep(indices.reshape(-1, 1), outputs_gradients.reshape(-1, width))
        return None, None, None, None
