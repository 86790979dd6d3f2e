"""Where each parameter of a model lies in one flat array, for workers to share its elements out.

A parameter keeps its own shape and strides (a convolution's weight in channels_last stays so); what
the flat array holds is the parameter's elements in *storage order*.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from paceline.plan.schedule import share_bounds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from paceline.transports.shared.node import SharedNode

# Float32 elements in a cache line of 64 bytes: no two workers ever write the same line, and every
# parameter begins as aligned as one that torch allocates.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """Consecutive elements of one parameter, in its storage order."""

    name: str
    start: int
    stop: int
    offset: int  # of element `start` in the flat array


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter lies, and how."""

    offset: int
    elements: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Places of parameters in a flat float32 array; made by `of`, narrowed by `only`."""

    elements: int  # of the whole array, padding included
    begin: int  # the elements from `begin` to `end` hold the parameters of this layout
    end: int
    _places: Mapping[str, _Place]

    @classmethod
    def of(cls, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Self:
        """Parameters one after the other, each at a multiple of 64 bytes.

        Raises ValueError for one that is not float32 or not dense (elements shared or left out).
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
        """The layout of some of the parameters, in the same places of the same array."""
        wanted = set(names)
        places = {name: place for name, place in self._places.items() if name in wanted}
        begin = min((p.offset for p in places.values()), default=0)
        end = max((_end(p) for p in places.values()), default=0)
        return replace(self, begin=begin, end=end, _places=places)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def view(self, flat: Tensor, name: str) -> Tensor:
        """A parameter's elements in `flat`, shape (elements,), with its own shape and strides."""
        place = self._places[name]
        offset = flat.storage_offset() + place.offset
        return flat.as_strided(place.shape, place.strides, offset)

    def bind(self, parameters: Mapping[str, nn.Parameter], flat: Tensor, *, copy: bool) -> None:
        """Let each parameter live in `flat`; with `copy`, fill it from the parameters first.

        What a parameter had before is freed before the next one is copied.
        """
        for name in self._places:
            parameter, view = parameters[name], self.view(flat, name)
            if copy:
                view.copy_(parameter.data)
            parameter.data = view

    def size(self, name: str) -> int:
        """Elements of a parameter."""
        return self._places[name].elements

    def shape_of(self, part: ParameterShard) -> tuple[int, ...]:
        """(rows, elements of each) of a part that is whole rows of a matrix, or of what can be
        seen as one; else (elements,)."""
        place, elements = self._places[part.name], part.stop - part.start
        row = place.elements // place.shape[0] if place.shape else 1
        if row == 1 or place.strides[0] != row or part.start % row or elements % row:
            return (elements,)
        return elements // row, row

    def shards(
        self, workers: int, rows: Mapping[str, int] | None = None
    ) -> list[list[ParameterShard]]:
        """What each worker owns, in the order of the parameters: as equal parts as they go.

        rows: parameters that are dealt out by whole rows, with their numbers of rows; all others
        are taken as one row of cache lines, and dealt out by those.
        """
        return [self._parts_of(worker, workers, rows or {}) for worker in range(workers)]

    def _parts_of(self, worker: int, workers: int, rows: Mapping[str, int]) -> list[ParameterShard]:
        lines = sum(_lines(place) for name, place in self._places.items() if name not in rows)
        low, high = (ALIGNMENT * bound for bound in share_bounds(lines, worker, workers))
        found = []
        passed = 0  # elements of those that are dealt out by lines
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
        """A tensor of the parameter's shape as shape (elements,), in the parameter's storage order.

        A view where the strides are the parameter's, as autograd makes gradients; else a copy.
        """
        place = self._places[name]
        if not _same_order(place, tensor.stride()):
            tensor = torch.empty_strided(place.shape, place.strides).copy_(tensor)
        return tensor.as_strided((place.elements,), (1,))


def _lines(place: _Place) -> int:
    """Cache lines that a parameter takes."""
    return -(-place.elements // ALIGNMENT)


def _end(place: _Place) -> int:
    return place.offset + ALIGNMENT * _lines(place)


def _check(name: str, parameter: nn.Parameter) -> None:
    reach = sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True)) + 1
    if parameter.dtype != torch.float32 or reach != parameter.numel():
        raise ValueError(
            f"parameter {name}: expected float32 elements without gaps, got {parameter.dtype} of "
            f"shape {tuple(parameter.shape)} with strides {parameter.stride()}"
        )


def _same_order(place: _Place, strides: tuple[int, ...]) -> bool:
    """Whether the strides agree, those of dimensions of size 1 aside, which mean nothing."""
    return strides == place.strides or all(
        size == 1 or ours == theirs
        for size, ours, theirs in zip(place.shape, place.strides, strides, strict=True)
    )


def shared_floats(shared: SharedNode, name: str, elements: int) -> Tensor:
    """Shape (elements,), float32, 0 at first: the same memory in all processes; collective."""
    memory = shared.memory(name, 4 * max(1, elements))  # there is no memory of no size
    return torch.from_numpy(memory).view(torch.float32)[:elements]
