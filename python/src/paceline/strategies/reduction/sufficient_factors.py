"""Weight gradients of linear layers from their factors, shared out by rows instead of summed.

The gradient of a linear layer's weight is (gradients of outputs).T @ inputs. Summed over replicas
it is the same product over all replicas' samples. So replicas hand one another the two factors, a
few megabytes, and each computes, once and for all of them, the rows that it owns: no replica ever
has the whole gradient of a fully connected layer, and nothing is summed. For AlexNet that is 95 %
of all gradients. (Xie et al.: Lighter-Communication Distributed Machine Learning via Sufficient
Factor Broadcasting, UAI 2016; Zhang et al.: Poseidon, USENIX ATC 2017. There the factors cross a
network and each replica computes the whole; here they lie in memory that all see.)

Under bf16 the weights of these layers are kept in that precision, too: autocast would cast all of
them in each replica, here each worker casts the rows that it has just stepped.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.training.linear import bias_gradient, joined, linear_that_keeps, weight_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from paceline.strategies.reduction.flat_layout import FlatLayout, ParameterShard

_LINE_BYTES = 64
# By name of the layer, what a replica's passes left: inputs and gradients of the outputs, shapes
# (samples, inputs) and (samples, outputs).
SufficientFactors = dict[str, tuple[Tensor, Tensor]]


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a model, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def rows_of(model: nn.Module) -> dict[str, int]:
    """Rows of each parameter of a linear layer, by the parameter's name."""
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
        """weights, copy: flat arrays of the layout, all workers' alike. names: of the parameters
        of linear layers; the rest of the copy is never looked at."""
        self._layout = layout
        self._weights = weights
        self._copy = copy
        self._names = names

    def of(self, name: str) -> Tensor:
        return self._layout.view(self._copy, name)

    def refresh(self, parts: Sequence[ParameterShard]) -> None:
        """Take over what was stepped, as far as it is copied at all; before the workers meet."""
        for part in (p for p in parts if p.name in self._names):
            place = slice(part.offset, part.offset + part.stop - part.start)
            self._copy[place].copy_(self._weights[place])


class SharedFactors:
    """SufficientFactors of one replica, in memory that other processes read."""

    def __init__(self, model: nn.Module, samples: int, dtype: torch.dtype, memory: Tensor) -> None:
        """samples: most that one pass may have. memory: bytes, shape (bytes_needed(…),)."""
        self._counts: dict[str, Tensor] = {}
        self._places: SufficientFactors = {}
        position = 0

        def take(elements: int, of: torch.dtype) -> Tensor:
            nonlocal position
            end = position + _lines_of_bytes(elements * of.itemsize)
            part, position = memory[position:end], end
            return part.view(of)[:elements]

        for name, layer in linear_layers(model).items():
            self._counts[name] = take(1, torch.int64)
            self._places[name] = (
                take(samples * layer.in_features, dtype).view(samples, -1),
                take(samples * layer.out_features, dtype).view(samples, -1),
            )

    @staticmethod
    def bytes_needed(model: nn.Module, samples: int, dtype: torch.dtype) -> int:
        sizes = [
            _lines_of_bytes(samples * features * dtype.itemsize)
            for layer in linear_layers(model).values()
            for features in (layer.in_features, layer.out_features)
        ]
        return sum(sizes) + len(sizes) // 2 * _lines_of_bytes(torch.int64.itemsize)

    def store(self, layer: str, inputs: Tensor, outputs_gradients: Tensor) -> None:
        """Copy what a pass left; the others must have read the last."""
        count = len(inputs)
        self._counts[layer].fill_(count)
        for place, factor in zip(self._places[layer], (inputs, outputs_gradients), strict=True):
            place[:count].copy_(factor)

    def read(self) -> SufficientFactors:
        """Views of what `store` left last."""
        found = {}
        for layer, (inputs, outputs_gradients) in self._places.items():
            count = int(self._counts[layer])
            found[layer] = (inputs[:count], outputs_gradients[:count])
        return found


def _lines_of_bytes(size: int) -> int:
    """Bytes rounded up to whole cache lines."""
    return -(-size // _LINE_BYTES) * _LINE_BYTES


def capture_sufficient_factors(
    model: nn.Module,
    store: Callable[[str, Tensor, Tensor], None],
    low_precision: LowPrecisionWeights | None,
) -> None:
    """From now on a backward pass through `model` hands the factors of each linear layer to
    `store`, with the layer's name, instead of setting its parameters' gradients."""
    for name, layer in linear_layers(model).items():
        # the module stays what it is, with its names and hooks
        layer.forward = partial(_forward, layer, name, partial(store, name), low_precision)  # type: ignore[method-assign]


def _forward(
    layer: nn.Linear,
    name: str,
    keep: Callable[[Tensor, Tensor], None],
    low_precision: LowPrecisionWeights | None,
    inputs: Tensor,
) -> Tensor:
    bias = layer.bias.detach()
    if low_precision is None:
        return linear_that_keeps(inputs, layer.weight.detach(), bias, keep)
    weight = low_precision.of(f"{name}.weight")
    bias = bias.to(weight.dtype)
    with torch.autocast("cpu", enabled=False):  # all operands have their precision already
        return linear_that_keeps(inputs.to(weight.dtype), weight, bias, keep)


class RowGradients:
    """The gradients of one worker's rows of the linear layers, in memory of their own."""

    def __init__(
        self, layout: FlatLayout, parts: Sequence[ParameterShard], rows: Mapping[str, int]
    ) -> None:
        """parts: what the worker owns; of the parameters in `rows`, whole rows."""
        self._layout = layout
        self._memory = {p.name: torch.empty(p.stop - p.start) for p in parts if p.name in rows}
        self._rows = rows

    def reader(
        self, factors: Sequence[SufficientFactors], otherwise: Callable[[ParameterShard], Tensor]
    ) -> Callable[[ParameterShard], Tensor]:
        """What gives a part's gradient over all replicas' samples, shape (stop - start,), float32.

        factors: of every replica, in one order for all workers. otherwise: for parts of other
        parameters.
        """

        def gradient_of(part: ParameterShard) -> Tensor:
            return self._gradient(part, factors) if part.name in self._rows else otherwise(part)

        return gradient_of

    def _gradient(self, part: ParameterShard, factors: Sequence[SufficientFactors]) -> Tensor:
        layer, _, own = part.name.rpartition(".")
        per_row = self._layout.size(part.name) // self._rows[part.name]
        rows = slice(part.start // per_row, part.stop // per_row)
        outputs_gradients = joined([of_replica[layer][1][:, rows] for of_replica in factors])
        gradient = self._memory[part.name]
        if own == "weight":
            inputs = joined([of_replica[layer][0] for of_replica in factors])
            weight_gradient(inputs, outputs_gradients, gradient.view(-1, per_row))
        else:
            bias_gradient(outputs_gradients, gradient)
        return gradient
