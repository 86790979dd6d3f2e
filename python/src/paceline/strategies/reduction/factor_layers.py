"""Layers of a replica whose gradients can be computed from gathered factors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.plan.factor_cost import EmbeddingShape
from paceline.strategies.reduction.embedding_factors import (
    capture_embeddings,
    embedding_gradient,
    embeddings,
)
from paceline.strategies.reduction.factor_choice import shape_of
from paceline.strategies.reduction.sufficient_factors import (
    capture_sufficient_factors,
    linear_layers,
    mark_summed_layers,
)
from paceline.training.linear import bias_gradient, weight_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from paceline.plan.factor_cost import FactorShape


class FactorLayers:
    """The linear layers and embeddings of a model that have sufficient factors."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        """example: an input of one sample."""
        mark_summed_layers(model, example)
        self._model = model
        modules = dict(model.named_modules())
        linear = linear_layers(model)
        self._layers: dict[str, nn.Linear | nn.Embedding] = {**linear}
        self.shapes: dict[str, FactorShape] = {n: shape_of(x) for n, x in linear.items()}
        for name, count in embeddings(model, example).items():
            table = modules[name]
            assert isinstance(table, nn.Embedding), "embeddings() returns no other modules"
            self._layers[name] = table
            self.shapes[name] = EmbeddingShape(
                rows=table.num_embeddings, outputs=table.embedding_dim, positions=count
            )

    def parameter_names(self, only: Container[str]) -> list[str]:
        """Return the names of the parameters of these layers."""
        return [
            f"{name}.{own}"
            for name, layer in self._layers.items()
            if name in only
            for own, _ in layer.named_parameters()
        ]

    def capture(
        self,
        only: Container[str],
        store: Callable[[str, Tensor, Tensor], None],
        store_inputs: Callable[[str, Tensor], None] | None = None,
    ) -> None:
        """Make passes give the factors of these layers to `store`, instead of setting gradients.

        store_inputs: gets the inputs of linear layers in the forward pass.
        """
        capture_sufficient_factors(self._model, store, only=only, store_inputs=store_inputs)
        capture_embeddings(self._model, only, store)

    def gradients(
        self, name: str, inputs: Tensor, outputs_gradients: Tensor, memory: dict[str, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters of a layer with their gradients, from the factors of all ranks.

        memory: where the gradients of weights are, by layer; reused if the weight has none.
        """
        layer = self._layers[name]
        if name not in memory or layer.weight.grad is not None:
            memory[name] = torch.empty_like(layer.weight)
        if isinstance(layer, nn.Embedding):
            embedding_gradient(inputs, outputs_gradients, layer.padding_idx, memory[name])
            return [(layer.weight, memory[name])]
        weight_gradient(inputs, outputs_gradients, memory[name])
        found: list[tuple[Tensor, Tensor]] = [(layer.weight, memory[name])]
        bias: Tensor | None = layer.bias
        if bias is not None:
            of_bias = torch.empty_like(bias)
            bias_gradient(outputs_gradients, of_bias)
            found.append((bias, of_bias))
        return found
