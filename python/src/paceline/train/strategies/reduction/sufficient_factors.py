"""Layers that have sufficient factors, and the interception of their passes.

The gradient of a linear layer's weight is (gradients of outputs).T @ inputs. Its two operands are
called sufficient factors. The gradient of an embedding has as many rows as the table, of which a
step changes only those that it looked up: the indices and the gradients of the outputs determine
it. Factors are smaller than the gradient if the layer is large and the samples are few. (Xie et
al.: Lighter-Communication Distributed Machine Learning via Sufficient Factor Broadcasting, UAI
2016; Zhang et al.: Poseidon, USENIX ATC 2017.)

Workers of a node share the factors, a few megabytes, and each computes only the rows of a linear
layer's gradient that it owns. No replica holds the whole gradient of a fully connected layer, and
nothing is summed. For AlexNet this covers 95 % of all gradients. Under bf16 the weights of these
layers are also kept in bfloat16. Autocast would cast all of them in each replica; here each worker
casts only the rows that it has stepped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import embedding

from paceline.train.strategies.reduction.flat_layout import (
    FlatLayout,
    ParameterShard,
    copy_shards,
    whole_lines,
)
from paceline.train.training.checkpointing import once
from paceline.train.training.tensors import (
    bias_gradient,
    evaluating,
    is_plain_linear,
    joined,
    linear_that_keeps,
    weight_gradient,
)

FactorLayer = nn.Linear | nn.Embedding
# Layer name -> (inputs, gradients of outputs) of one replica, shapes (samples, inputs) and
# (samples, outputs).
SufficientFactors = dict[str, tuple[Tensor, Tensor]]


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
    calls = _input_shapes(model, found, example) if found else {}
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
    calls = _input_shapes(model, found, example) if found else {}
    return {name: shapes[0].numel() for name, shapes in calls.items() if len(shapes) == 1}


def _input_shapes(
    model: nn.Module, layers: Mapping[str, nn.Module], example: Tensor
) -> dict[str, list[torch.Size]]:
    """Return for each layer the shapes of its inputs in a forward pass of `example`.

    The pass takes less than a third of a training step. One of fake tensors would import SymPy,
    which takes half a second. A model that cannot pass gets no calls.
    """
    calls: dict[str, list[torch.Size]] = {name: [] for name in layers}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _module, inputs, name=name: calls[name].append(inputs[0].shape)
        )
        for name, layer in layers.items()
    ]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            functional_call(model, buffers, (example,))
    except Exception:  # noqa: BLE001  (any model of a user; sums are always right)
        return {name: [] for name in layers}
    finally:
        for hook in hooks:
            hook.remove()
    return calls


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
