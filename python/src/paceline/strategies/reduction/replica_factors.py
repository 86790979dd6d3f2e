"""Layers of a replica whose gradients are computed from the factors of all ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.costs.factor_cost import EmbeddingShape
from paceline.strategies.reduction.factor_choice import ChoiceContext, shape_of
from paceline.strategies.reduction.factor_exchange import FactorExchange, open_group
from paceline.strategies.reduction.factor_layers import (
    capture,
    embedding_gradient,
    embeddings,
    linear_layers,
    parameter_names,
)
from paceline.training.linear import bias_gradient, weight_gradient

if TYPE_CHECKING:
    from paceline.costs.factor_cost import FactorShape
    from paceline.strategies.reduction.factor_layers import FactorLayer
    from paceline.transports.bucket_settings import FactorSetting


class ReplicaFactors(FactorExchange):
    """The exchange and the products of one replica per rank, among all ranks.

    A step is `begin`, the passes, `finish`. Without a layer that sends factors it does nothing.
    """

    def __init__(self, setting: FactorSetting) -> None:
        super().__init__(setting)
        self.parameter_names: frozenset[str] = frozenset()  # whose gradients are computed here
        self.ready_s = 0.0  # when the last factor of this rank was ready, time of perf_counter
        self._captured: dict[str, FactorLayer] = {}
        # Memory of the gradients of weights, by layer; reused if the weight has no gradient.
        self._memory: dict[str, Tensor] = {}

    def join(
        self,
        model: nn.Module,
        example: Tensor,
        samples: int,
        dtype: torch.dtype,
        limit_s: float | None,
    ) -> None:
        """Choose the layers of `model`; collective over all ranks.

        example: an input of one sample. samples: maximum number of samples of a rank in a step.
        dtype: of the factors. limit_s: limit of each wait; None means torch's default. Raises
        EnvironmentLacks if the ranks would compute different gradients.
        """
        modules: dict[str, nn.Module] = dict(model.named_modules())
        layers: dict[str, FactorLayer] = {**linear_layers(model, example)}
        shapes: dict[str, FactorShape] = {
            name: shape_of(layer) for name, layer in layers.items() if isinstance(layer, nn.Linear)
        }
        for name, count in embeddings(model, example).items():
            table = modules[name]
            assert isinstance(table, nn.Embedding), "embeddings() returns no other modules"
            layers[name] = table
            shapes[name] = EmbeddingShape(
                rows=table.num_embeddings, outputs=table.embedding_dim, positions=count
            )
        context = ChoiceContext(
            setting=self.choice.setting,
            samples=samples,
            dtype=dtype,
            gathering=open_group(limit_s) if shapes else None,
            reducing=None,
            ranks=dist.get_world_size(),
        )
        self.choose(shapes, context)
        self._captured = {name: layers[name] for name in self.layers}
        self.parameter_names = parameter_names(self._captured.items())

    def capture(self) -> None:
        """Let passes through the chosen layers keep their factors."""
        capture(self._captured, self._store, store_inputs=self.keep_inputs)

    def finish(self) -> float:
        """Compute the gradients of the layers as their factors arrive. Return the seconds of the
        products."""
        spent_s = 0.0
        for name in reversed(self.layers):
            factors = self.wait(name)
            started_s = time.perf_counter()
            for parameter, gradient in self._products(name, *factors):
                parameter.grad = gradient
            spent_s += time.perf_counter() - started_s
        return spent_s

    def _products(
        self, name: str, inputs: Tensor, outputs_gradients: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters of a layer with their gradients, from the factors of all ranks."""
        layer, memory = self._captured[name], self._memory
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

    def _store(self, layer: str, inputs: Tensor, gradients: Tensor) -> None:
        if isinstance(self._captured[layer], nn.Embedding):
            self.keep_inputs(layer, inputs)  # others have been kept in the forward pass
        self.keep_gradients(layer, gradients)
        self.ready_s = time.perf_counter()
