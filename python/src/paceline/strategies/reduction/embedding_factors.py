"""Sufficient factors of embeddings: the indices that a pass looks up, and the gradients of its
outputs.

The gradient of an embedding has as many rows as the table, of which a step changes only those that
it looked up. Indices and gradients of the outputs determine it, and are smaller if the table is
large.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from paceline.training.fake_tensors import input_shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Container


def embeddings(model: nn.Module, example: Tensor) -> dict[str, int]:
    """Return the number of indices of one sample for each embedding with sufficient factors.

    Such an embedding is called once in a pass, is trained, shares its table with no other module,
    and changes neither table nor gradients (max_norm, scale_grad_by_freq, sparse). example: an
    input of one sample.
    """
    users = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Embedding
        and users[id(module.weight)] == 1
        and module.weight.requires_grad
        and module.max_norm is None
        and not (module.scale_grad_by_freq or module.sparse)
    }
    if not found:
        return {}
    calls = input_shapes(model, found, example)
    return {name: shapes[0].numel() for name, shapes in calls.items() if len(shapes) == 1}


def capture_embeddings(
    model: nn.Module, only: Container[str], store: Callable[[str, Tensor, Tensor], None]
) -> None:
    """Make backward passes pass indices, shape (rows, 1), and gradients of the outputs, shape
    (rows, width), to `store` with the name of the embedding, instead of setting its gradient."""
    for name, module in model.named_modules():
        if name in only and isinstance(module, nn.Embedding):
            module.forward = partial(_forward, module, partial(store, name))  # type: ignore[method-assign]


def _forward(
    layer: nn.Embedding, keep: Callable[[Tensor, Tensor], None], indices: Tensor
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
        keep: Callable[[Tensor, Tensor], None],
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
