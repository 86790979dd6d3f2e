"""Layers of a replica whose gradients can be computed from gathered factors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.costs.factor_cost import EmbeddingShape
from paceline.strategies.reduction.embedding_factors import (
    capture_embeddings,
    embedding_gradient,
    embeddings,
)
from paceline.strategies.reduction.factor_choice import (
    ChoiceContext,
    FactorChoice,
    choose,
    shape_of,
)
from paceline.strategies.reduction.factor_exchange import FactorExchange, open_group
from paceline.strategies.reduction.sufficient_factors import (
    capture_sufficient_factors,
    linear_layers,
    mark_summed_layers,
)
from paceline.training.linear import bias_gradient, weight_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from paceline.costs.factor_cost import FactorShape
    from paceline.transports.bucket_settings import FactorSetting


class FactorLayers:
    """The linear layers and embeddings of a model that have sufficient factors."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        """example: an input of one sample."""
        mark_summed_layers(model, example)
        self._model = model
        # Memory of the gradients of weights, by layer; reused if the weight has no gradient.
        self._memory: dict[str, Tensor] = {}
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

    def join(
        self, setting: FactorSetting, samples: int, dtype: torch.dtype, limit_s: float | None
    ) -> tuple[FactorChoice, FactorExchange | None]:
        """Choose the layers that send factors, and open their exchange; collective over all ranks.

        samples: maximum number of samples of a rank in a step. dtype: of the factors. limit_s:
        limit of each wait; None means torch's default. The exchange is None if no layer sends
        factors. Only the caller keeps it, see ddp_factors.py. Raises EnvironmentLacks if the ranks
        would compute different gradients.
        """
        group = open_group(limit_s) if self.shapes else None
        context = ChoiceContext(
            setting=setting,
            samples=samples,
            dtype=dtype,
            gathering=group,
            reducing=None,
            ranks=dist.get_world_size(),
        )
        choice = choose(self.shapes, context)
        if not choice.chosen:
            return choice, None
        chosen = {name: self.shapes[name] for name in choice.chosen}
        return choice, FactorExchange(chosen, samples, dtype, group)

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
        self, name: str, inputs: Tensor, outputs_gradients: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters of a layer with their gradients, from the factors of all ranks."""
        layer, memory = self._layers[name], self._memory
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
