"""Weight gradients of linear layers from sufficient factors, divided by rows instead of summed.

The gradient of a linear layer's weight is (gradients of outputs).T @ inputs. Its two operands are
called sufficient factors. Summed over replicas, the gradient is the same product over the samples
of all replicas. So replicas share the factors, a few megabytes, and each computes only the rows
that it owns. No replica holds the whole gradient of a fully connected layer, and nothing is summed.
For AlexNet this covers 95 % of all gradients. (Xie et al.: Lighter-Communication Distributed
Machine Learning via Sufficient Factor Broadcasting, UAI 2016; Zhang et al.: Poseidon, USENIX ATC
2017. There the factors cross a network and each replica computes the whole gradient; here they are
in shared memory.)

Under bf16 the weights of these layers are also kept in bfloat16. Autocast would cast all of them in
each replica; here each worker casts only the rows that it has stepped.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.strategies.reduction.flat_layout import copy_shards, whole_lines
from paceline.training.fake_tensors import input_shapes
from paceline.training.linear import (
    bias_gradient,
    is_plain_linear,
    joined,
    linear_that_keeps,
    weight_gradient,
)
from paceline.training.recomputation import once

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from paceline.strategies.reduction.flat_layout import FlatLayout, ParameterShard

_SUMMED = "paceline_summed"  # attribute of a layer without sufficient factors
# Layer name -> (inputs, gradients of outputs) of one replica, shapes (samples, inputs) and
# (samples, outputs).
SufficientFactors = dict[str, tuple[Tensor, Tensor]]


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers whose gradients are computed from sufficient factors, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if is_plain_linear(module) and not getattr(module, _SUMMED, False)
    }


def mark_summed_layers(model: nn.Module, example: Tensor) -> None:
    """Mark the linear layers whose gradients must be summed like those of other layers.

    Sufficient factors need a layer with one row per sample, called once in a pass, with parameters
    of its own that are all trained. Layers of sequences have more rows than factors would save;
    tied weights and layers whose weights another module uses (nn.MultiheadAttention) get gradients
    from elsewhere, too.
    example: an input of one sample.
    """
    calls = input_shapes(model, linear_layers(model), example)
    users = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for name, layer in linear_layers(model).items():
        is_shared = any(users[id(p)] > 1 for p in layer.parameters())
        is_frozen = not all(p.requires_grad for p in layer.parameters())
        rows = [shape[:-1] for shape in calls[name]]
        if rows != [(1,)] or is_shared or is_frozen:
            setattr(layer, _SUMMED, True)


def mark_all_but(model: nn.Module, names: Container[str]) -> None:
    """Mark all linear layers except these."""
    for name, layer in linear_layers(model).items():
        if name not in names:
            setattr(layer, _SUMMED, True)


def rows_of(model: nn.Module) -> dict[str, int]:
    """Return the number of rows of each parameter of a linear layer, by the name of the
    parameter."""
    return {
        f"{name}.{own}": layer.out_features
        for name, layer in linear_layers(model).items()
        for own, _ in layer.named_parameters()
    }


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
        self, model: nn.Module, samples: Mapping[str, int], dtype: torch.dtype, memory: Tensor
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

        for name, layer in linear_layers(model).items():
            self._counts[name] = take(1, torch.int64)
            self._places[name] = (
                take(samples[name] * layer.in_features, dtype).view(samples[name], -1),
                take(samples[name] * layer.out_features, dtype).view(samples[name], -1),
            )

    @staticmethod
    def bytes_needed(model: nn.Module, samples: Mapping[str, int], dtype: torch.dtype) -> int:
        sizes = [
            whole_lines(samples[name] * features * dtype.itemsize)
            for name, layer in linear_layers(model).items()
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


def capture_sufficient_factors(
    model: nn.Module,
    store: Callable[[str, Tensor, Tensor], None],
    low_precision: LowPrecisionWeights | None = None,
    *,
    only: Container[str] | None = None,
    store_inputs: Callable[[str, Tensor], None] | None = None,
) -> None:
    """Make backward passes through `model` pass the factors of each linear layer to `store` with
    the name of the layer, instead of setting the gradients of its parameters.

    only: names of layers; None means all. store_inputs: gets the inputs in the forward pass.
    """
    for name, layer in linear_layers(model).items():
        if only is not None and name not in only:
            continue
        keep_inputs = None if store_inputs is None else partial(store_inputs, name)
        forward = partial(_forward, layer, name, partial(store, name), keep_inputs, low_precision)
        layer.forward = forward  # type: ignore[method-assign]  # the module keeps names and hooks


def _forward(
    layer: nn.Linear,
    name: str,
    keep: Callable[[Tensor, Tensor], None],
    keep_inputs: Callable[[Tensor], None] | None,
    low_precision: LowPrecisionWeights | None,
    inputs: Tensor,
) -> Tensor:
    weight = layer.weight.detach()
    if low_precision is not None:
        weight = low_precision.of(f"{name}.weight")
    elif torch.is_autocast_enabled("cpu"):
        weight = weight.to(torch.get_autocast_dtype("cpu"))
    inputs = inputs.to(weight.dtype)
    own_bias: Tensor | None = layer.bias
    bias = None if own_bias is None else own_bias.detach().to(weight.dtype)
    if keep_inputs is not None and torch.is_grad_enabled():
        once(lambda: keep_inputs(inputs.detach().flatten(0, -2)))
    with torch.autocast("cpu", enabled=False):  # all operands already have their precision
        return linear_that_keeps(inputs, weight, bias, keep)


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
