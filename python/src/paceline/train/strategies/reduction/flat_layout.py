"""Places of a model's parameters in one flat array, their division into shards, and a replica that
updates its weights there by itself.

A parameter keeps its shape and strides (a convolution weight in channels_last stays so). The flat
array holds the elements of each parameter in *storage order*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from paceline.base.errors import TimedOut, UsageError
from paceline.collectives.message_schedules import share_bounds
from paceline.collectives.node.shared_node import SharedNode
from paceline.train.training.batch_norm import normalise_alone
from paceline.train.training.optimizers import TaskOptimizer, no_gradient, trained_parameters
from paceline.train.training.state import Elements

# Float32 elements in a cache line of 64 bytes. No two workers write the same line, and parameters
# have the same alignment as tensors that torch allocates.
ALIGNMENT = 16
_LINE_BYTES = 4 * ALIGNMENT


def whole_lines(size: int) -> int:
    """Round a number of bytes up to whole cache lines."""
    return -(-size // _LINE_BYTES) * _LINE_BYTES


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """Consecutive elements of one parameter, in its storage order."""

    name: str
    start: int
    stop: int
    offset: int  # index of element `start` in the flat array

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def place(self) -> slice:
        """Return the elements of the flat array that hold the shard."""
        return slice(self.offset, self.offset + self.elements)


@dataclass(frozen=True, slots=True)
class _Place:
    """Place and layout of a parameter."""

    offset: int
    elements: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Places of parameters in a flat float32 array; constructed by `of`, restricted by `only`."""

    elements: int  # size of the whole array, including padding
    begin: int  # the elements from `begin` to `end` hold the parameters of this layout
    end: int
    _places: Mapping[str, _Place]

    @classmethod
    def of(cls, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Self:
        """Place parameters one after the other, each at a multiple of 64 bytes.

        Raises UsageError for a parameter that is not float32 or not dense.
        """
        places: dict[str, _Place] = {}
        offset = 0
        for name, parameter in named_parameters:
            _check(name, parameter)
            places[name] = _Place(
                offset, parameter.numel(), tuple(parameter.shape), parameter.stride()
            )
            offset += ALIGNMENT * _lines(places[name])
        return cls(offset, 0, offset, places)

    def only(self, names: Iterable[str]) -> Self:
        """Return the layout of some of the parameters, in the same places of the same array."""
        wanted = set(names)
        places = {name: place for name, place in self._places.items() if name in wanted}
        begin = min((p.offset for p in places.values()), default=0)
        end = max((_end(p) for p in places.values()), default=0)
        return replace(self, begin=begin, end=end, _places=places)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Return a parameter's elements in `flat`, shape (elements,), with the shape and strides of
        the parameter."""
        place = self._places[name]
        offset = flat.storage_offset() + place.offset
        return flat.as_strided(place.shape, place.strides, offset)

    def bind(self, parameters: Mapping[str, nn.Parameter], flat: Tensor, *, copy: bool) -> None:
        """Make each parameter a view of `flat`; with `copy`, copy its values there first.

        The old memory of a parameter is freed before the next one is copied.
        """
        for name in self._places:
            parameter, view = parameters[name], self.view(flat, name)
            if copy:
                view.copy_(parameter.data)
            parameter.data = view

    def size(self, name: str) -> int:
        """Return the number of elements of a parameter."""
        return self._places[name].elements

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter."""
        return self._places[name].shape

    def elements_of(self, shard: ParameterShard, values: Tensor) -> Elements:
        """Return values of a shard, shape (shard.elements,), with their place in the parameter."""
        place = self._places[shard.name]
        return Elements(
            name=shard.name,
            shape=place.shape,
            strides=place.strides,
            start=shard.start,
            values=values.detach(),
        )

    def part(self, shard: ParameterShard, tensor: Tensor) -> Tensor:
        """Return a shard of a tensor that has the parameter's shape, shape (shard.elements,)."""
        return self.in_storage_order(shard.name, tensor)[shard.start : shard.stop]

    def shape_of(self, shard: ParameterShard) -> tuple[int, ...]:
        """Return (rows, elements per row) of a shard that consists of whole rows of a matrix (or of
        a tensor that can be viewed as one), else (elements,)."""
        place, elements = self._places[shard.name], shard.elements
        row = place.elements // place.shape[0] if place.shape else 1
        if row == 1 or place.strides[0] != row or shard.start % row or elements % row:
            return (elements,)
        return elements // row, row

    def shards(
        self, workers: int, rows: Mapping[str, int] | None = None
    ) -> list[list[ParameterShard]]:
        """Divide the parameters among workers as equally as possible; shards are in the order of
        the parameters.

        rows: parameters that are divided by whole rows, with their numbers of rows. All others are
        treated as one sequence of cache lines.
        """
        return [self._shards_of(worker, workers, rows or {}) for worker in range(workers)]

    def _shards_of(
        self, worker: int, workers: int, rows: Mapping[str, int]
    ) -> list[ParameterShard]:
        lines = sum(_lines(place) for name, place in self._places.items() if name not in rows)
        low, high = (ALIGNMENT * bound for bound in share_bounds(lines, worker, workers))
        found = []
        passed = 0  # elements of earlier parameters that are divided by cache lines
        for name, place in self._places.items():
            if name in rows:
                per_row = place.elements // rows[name]
                start, stop = (per_row * b for b in share_bounds(rows[name], worker, workers))
            else:
                start, stop = max(low - passed, 0), min(high - passed, place.elements)
                passed += ALIGNMENT * _lines(place)
            if start < stop:
                found.append(ParameterShard(name, start, stop, place.offset + start))
        return found

    def in_storage_order(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape as shape (elements,), in the storage order of
        the parameter.

        The result is a view if the strides are those of the parameter, as for gradients of
        autograd; else a copy.
        """
        place = self._places[name]
        if not _same_order(place, tensor.stride()):
            tensor = torch.empty_strided(place.shape, place.strides).copy_(tensor)
        return tensor.as_strided((place.elements,), (1,))


def _lines(place: _Place) -> int:
    """Return the number of cache lines of a parameter."""
    return -(-place.elements // ALIGNMENT)


def _end(place: _Place) -> int:
    return place.offset + ALIGNMENT * _lines(place)


def _check(name: str, parameter: nn.Parameter) -> None:
    reach = sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True)) + 1
    if parameter.dtype != torch.float32 or reach != parameter.numel():
        raise UsageError(
            f"parameter {name}: expected float32 elements without gaps, got {parameter.dtype} of "
            f"shape {tuple(parameter.shape)} with strides {parameter.stride()}; use .float() and "
            ".contiguous() in the model, or a strategy in which each replica updates all parameters"
        )


def _same_order(place: _Place, strides: tuple[int, ...]) -> bool:
    """Compare strides, ignoring dimensions of size 1, whose strides have no meaning."""
    return strides == place.strides or all(
        size == 1 or ours == theirs
        for size, ours, theirs in zip(place.shape, place.strides, strides, strict=True)
    )


def copy_shards(shards: Iterable[ParameterShard], source: Tensor, target: Tensor) -> None:
    """Copy shards from one flat array to another."""
    for shard in shards:
        target[shard.place].copy_(source[shard.place])


def touch(shards: Iterable[ParameterShard], flat: Tensor) -> None:
    """Write zeros to the shards, so that their pages are allocated on this worker's NUMA node.

    The policy of the process decides where; a user can set another one by numactl(8).
    """
    for shard in shards:
        flat[shard.place] = 0


def shared_floats(shared: SharedNode, name: str, elements: int) -> Tensor:
    """Return zeros of shape (elements,), float32, in memory that all processes of the node share;
    collective."""
    [found] = shared_arrays(shared, name, [elements])
    return found


def shared_arrays(shared: SharedNode, name: str, elements: Sequence[int]) -> list[Tensor]:
    """Return several arrays as `shared_floats` does, with one barrier."""
    memories = shared.memories(name, [4 * each for each in elements])
    return [torch.from_numpy(memory).view(torch.float32) for memory in memories]


def gradients_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """Return the gradients that parameters have, by name."""
    return {name: p.grad for name, p in parameters if p.grad is not None}


def too_slow(kind: str, rank: int, slow: Iterable[int], step: int, limit_s: float) -> TimedOut:
    """Return the error about ranks that do not finish a step. kind: "rank" or "local rank"."""
    names = ", ".join(map(str, slow))
    return TimedOut(
        f"{kind} {rank}: waited {limit_s:g} s (limits.collective_s) for {kind} {names} to finish "
        f"step {step}; no rank made progress. Look at the logs of these ranks; if they only need "
        "more time, increase limits.collective_s in the spec"
    )


class FlatReplica:
    """A model whose trained parameters are views of `weights`.

    weights: shape (elements,), float32, every parameter in storage order from a multiple of 64
    bytes, zeros between. Changing it changes the model. Running statistics of batch normalisation
    are those of this replica, and lie elsewhere.
    """

    def __init__(
        self, model: nn.Module, memory: Callable[[int], Tensor] = torch.zeros, *, copy: bool = True
    ) -> None:
        """memory: returns an array of so many elements. copy: put the weights of the model there;
        otherwise it has them already, or another replica puts them there."""
        normalise_alone(model)
        self.model = model
        self.parameters = trained_parameters(model)
        self.layout = FlatLayout.of(self.parameters.items())
        self.weights = memory(self.layout.elements)
        self.layout.bind(self.parameters, self.weights, copy=copy)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parts of an array like `weights` by the names of the parameters."""
        return {name: self.layout.view(flat, name) for name in self.layout.names}

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by the model's own names, between a backward pass and a step."""
        return gradients_of(self.parameters.items())

    def require_gradients(self) -> None:
        """Raise UsageError if a parameter has no gradient after a backward pass."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                raise no_gradient(name)

    def state_dict(self, weights: Tensor | None = None) -> dict[str, Tensor]:
        """Return the state of the model; weights: others in an array like its own."""
        if weights is None:
            return dict(self.model.state_dict())
        self.layout.bind(self.parameters, weights, copy=False)  # also tied ones, of several names
        state = dict(self.model.state_dict())
        self.layout.bind(self.parameters, self.weights, copy=False)
        return state

    def step_part(self, optimizer: TaskOptimizer, share: float) -> None:
        """Step with the gradients of a part of a batch, whose loss is a mean over the batch.

        share: samples of the part / samples of the batch; other replicas have the rest.
        """
        if share:
            for gradient in self.gradients().values():
                gradient.div_(share)
        optimizer.step_part(share, progress=1.0)
