"""Weight gradients of linear layers from sufficient factors, divided by rows instead of summed.

Summed over replicas, the gradient is the product of the factors of all replicas (see
factor_layers.py). So replicas share the factors, a few megabytes, and each computes only the rows
that it owns. No replica holds the whole gradient of a fully connected layer, and nothing is summed.
For AlexNet this covers 95 % of all gradients.

Under bf16 the weights of these layers are also kept in bfloat16. Autocast would cast all of them in
each replica; here each worker casts only the rows that it has stepped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.strategies.reduction.flat_layout import copy_shards, whole_lines
from paceline.training.linear import bias_gradient, joined, weight_gradient

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from paceline.strategies.reduction.flat_layout import FlatLayout, ParameterShard

# Layer name -> (inputs, gradients of outputs) of one replica, shapes (samples, inputs) and
# (samples, outputs).
SufficientFactors = dict[str, tuple[Tensor, Tensor]]


class LowPrecisionWeights:
    """A copy of the linear layers' weights in the precision of autocast."""

    def __init__(
        self, layout: FlatLayout, weights: Tensor, copy: Tensor, names: Container[str]
    ) -> None:
        """weights, copy: flat arrays of the layout, shared by all workers. names: parameters of
        linear layers; the rest of the copy is not used."""
        self._layout = layout
        self._weights = weights
        self._copy = copy
        self._names = names

    def of(self, name: str) -> Tensor:
        return self._layout.view(self._copy, name)

    def refresh(self, shards: Sequence[ParameterShard]) -> None:
        """Copy the stepped shards, as far as they are in `names`. Call it before the barrier of the
        workers."""
        copy_shards((s for s in shards if s.name in self._names), self._weights, self._copy)


class SharedFactors:
    """Sufficient factors of one replica, in memory that other processes read."""

    def __init__(
        self,
        layers: Mapping[str, nn.Linear],
        samples: Mapping[str, int],
        dtype: torch.dtype,
        memory: Tensor,
    ) -> None:
        """samples: maximum number of samples of a step, by layer. memory: bytes, shape
        (bytes_needed(…),)."""
        self._counts: dict[str, Tensor] = {}
        self._places: SufficientFactors = {}
        position = 0

        def take(elements: int, of: torch.dtype) -> Tensor:
            nonlocal position
            end = position + whole_lines(elements * of.itemsize)
            part, position = memory[position:end], end
            return part.view(of)[:elements]

        for name, layer in layers.items():
            self._counts[name] = take(1, torch.int64)
            self._places[name] = (
                take(samples[name] * layer.in_features, dtype).view(samples[name], -1),
                take(samples[name] * layer.out_features, dtype).view(samples[name], -1),
            )

    @staticmethod
    def bytes_needed(
        layers: Mapping[str, nn.Linear], samples: Mapping[str, int], dtype: torch.dtype
    ) -> int:
        sizes = [
            whole_lines(samples[name] * features * dtype.itemsize)
            for name, layer in layers.items()
            for features in (layer.in_features, layer.out_features)
        ]
        return sum(sizes) + len(sizes) // 2 * whole_lines(torch.int64.itemsize)

    def begin(self) -> None:
        """Begin a step; the others must have read the factors of the previous one."""
        for count in self._counts.values():
            count.zero_()

    def store(self, layer: str, inputs: Tensor, outputs_gradients: Tensor) -> None:
        """Copy the factors of one pass behind those of the step's earlier passes."""
        start = int(self._counts[layer])
        end = start + len(inputs)
        self._counts[layer].fill_(end)
        for place, factor in zip(self._places[layer], (inputs, outputs_gradients), strict=True):
            place[start:end].copy_(factor)

    def read(self) -> SufficientFactors:
        """Return views of the factors that `store` has copied since `begin`."""
        found = {}
        for layer, (inputs, outputs_gradients) in self._places.items():
            count = int(self._counts[layer])
            found[layer] = (inputs[:count], outputs_gradients[:count])
        return found


class RowGradients:
    """Gradients of one worker's rows of the linear layers, in reused memory."""

    def __init__(
        self, layout: FlatLayout, shards: Sequence[ParameterShard], rows: Mapping[str, int]
    ) -> None:
        """shards: the shards that the worker owns; those of parameters in `rows` are whole rows."""
        self._layout = layout
        self._memory = {s.name: torch.empty(s.elements) for s in shards if s.name in rows}
        self._rows = rows

    def compute(self, shard: ParameterShard, factors: Sequence[SufficientFactors]) -> Tensor | None:
        """Return a shard's gradient over all replicas' samples, shape (stop - start,), float32.

        None if the shard does not belong to a linear layer. factors: those of every replica, in the
        same order on all workers. One that has gathered those of all replicas may be the only one.
        """
        if shard.name not in self._rows:
            return None
        layer, _, own = shard.name.rpartition(".")
        per_row = self._layout.size(shard.name) // self._rows[shard.name]
        rows = slice(shard.start // per_row, shard.stop // per_row)
        of_layer = [of_replica[layer] for of_replica in factors if layer in of_replica]
        outputs_gradients = joined([gradients[:, rows] for _, gradients in of_layer])
        gradient = self._memory[shard.name]
        if own == "weight":
            inputs = joined([inputs for inputs, _ in of_layer])
            weight_gradient(inputs, outputs_gradients, gradient.view(-1, per_row))
        else:
            bias_gradient(outputs_gradients, gradient)
        return gradient
