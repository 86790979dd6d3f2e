"""The state of a training in a form that does not depend on the layout.

Tensors have the names of the model's parameters: `weights/NAME`, `buffers/NAME`, and
`optimizer/NAME/KEY` for what torch's optimiser keeps for a parameter. A rank gives the consecutive
elements that it owns (RankState); a reader joins them to whole tensors (SavedState). Parameters
that are not trained never change, so they are not part of the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.base.errors import DataError, UsageError
from paceline.train.training.optimizers import TaskOptimizer

WEIGHTS, BUFFERS, OPTIMIZER, RATES = "weights", "buffers", "optimizer", "rates"
STEP_KEY = "step"  # torch.optim's counter, a scalar for any parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Consecutive elements of a tensor, in the storage order of the tensor.

    values: shape (elements,); a view of live memory, which may change with the next step.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor, as are the strides
    strides: tuple[int, ...]
    start: int
    values: Tensor


@dataclass(frozen=True, slots=True)
class RankState:
    """The part of the state that one rank owns. values: JSON values by name."""

    tensors: list[Elements] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def add_whole(self, name: str, tensor: Tensor) -> None:
        """Add a whole tensor."""
        tensor = tensor.detach()
        if not _is_dense(tensor.shape, tensor.stride()):
            tensor = tensor.contiguous()
        flat = tensor.as_strided((tensor.numel(),), (1,))
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        own = Elements(name=name, shape=shape, strides=strides, start=0, values=flat)
        self.tensors.append(own)

    def add_model(self, model: nn.Module) -> None:
        """Add the trained parameters and the persistent buffers of a model."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.add_whole(f"{WEIGHTS}/{name}", parameter)
        self.add_buffers(persistent_buffers(model))

    def add_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Add buffers by name."""
        for name, buffer in buffers.items():
            self.add_whole(f"{BUFFERS}/{name}", buffer)

    def add_optimizer(
        self,
        optimizer: TaskOptimizer,
        shard_of: Callable[[str, Tensor], Elements] | None = None,
        *,
        prefix: str = "",
    ) -> None:
        """Add the state of an optimiser.

        shard_of: function of a parameter's name and of values with the shape of the optimiser's
        parameter, which returns their place in the whole parameter; None for whole parameters.
        prefix: `replica/N/` for the state of one of several replicas, see SavedState.
        Raises UsageError for state that is neither a tensor nor a number.
        """
        for name, parameter, key, value in optimizer.state():
            full = f"{prefix}{OPTIMIZER}/{name}/{key}"
            if not isinstance(value, torch.Tensor):
                self.values[full] = _json_value(full, value)
            elif shard_of is None or key == STEP_KEY or value.shape != parameter.shape:
                self.add_whole(full, value)
            else:
                self.tensors.append(replace(shard_of(name, value), name=full))
        for name, rate in optimizer.learning_rates().items():
            self.values[f"{RATES}/{name}"] = rate


class SavedState(Protocol):
    """The state of all ranks, as it was saved.

    Where replicas have optimisers of their own (`replica/N/...`), a reader gets those of its own
    replica, or their mean if the number of replicas has changed.
    """

    steps: int  # optimiser steps done

    def of_replica(self, replica: int, replicas: int) -> SavedState:
        """Return the same state as seen by one of several replicas."""

    def names(self, prefix: str) -> list[str]:
        """Return the names of tensors and values below `prefix`, without it."""

    def tensor(self, name: str) -> Tensor | None:
        """Return a whole tensor on the CPU; None if there is none of that name."""

    def value(self, name: str) -> Any:
        """Return a JSON value; None if there is none of that name."""


def restore_model(model: nn.Module, saved: SavedState) -> None:
    """Set the trained parameters and the persistent buffers of a model, in place.

    Raises DataError if the state lacks one, or has another shape.
    """
    named = {f"{WEIGHTS}/{n}": p for n, p in model.named_parameters() if p.requires_grad}
    restore_tensors(named, saved)
    restore_buffers(persistent_buffers(model), saved)


def restore_buffers(buffers: Mapping[str, Tensor], saved: SavedState) -> None:
    """Set buffers in place. Raises DataError as `restore_model`."""
    restore_tensors({f"{BUFFERS}/{name}": buffer for name, buffer in buffers.items()}, saved)


@torch.no_grad()
def restore_tensors(targets: Mapping[str, Tensor], saved: SavedState) -> None:
    """Set tensors in place, by their names in the state. Raises DataError as `restore_model`."""
    for name, target in targets.items():
        target.copy_(whole(saved, name, tuple(target.shape)))


def whole(saved: SavedState, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a saved tensor. Raises DataError if it is missing or has another shape."""
    tensor = saved.tensor(name)
    if tensor is None or tuple(tensor.shape) != shape:
        got = "none" if tensor is None else f"shape {tuple(tensor.shape)}"
        raise DataError(f"checkpoint: {name}: expected a tensor of shape {shape}, got {got}")
    return tensor


def divisible(parameter: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an optimiser's saved tensor, of which each worker takes a part.

    Raises DataError if it has another shape than its parameter.
    """
    if tuple(tensor.shape) != shape:
        raise DataError(
            f"checkpoint: the optimiser's state of {parameter} has shape {tuple(tensor.shape)}, "
            "which cannot be divided; continue with local strategy sequential or intraop"
        )
    return tensor


@torch.no_grad()
def restore_optimizer(
    optimizer: TaskOptimizer,
    saved: SavedState,
    part_of: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Set the state of an optimiser, and repeat the steps of its schedule from the start.

    part_of: function of a parameter's name and a whole tensor of the parameter's shape, which
    returns the elements that the optimiser has; None for whole parameters.
    Raises DataError if the schedule does not give the saved learning rates again.
    """
    if optimizer.has_stepped:
        optimizer.begin()
    for name, parameter in optimizer.parameters():
        for key in saved.names(f"{OPTIMIZER}/{name}/"):
            full = f"{OPTIMIZER}/{name}/{key}"
            tensor = saved.tensor(full)
            if tensor is None:
                optimizer.set_state(parameter, key, saved.value(full))
            elif key == STEP_KEY or part_of is None:
                optimizer.set_state(parameter, key, tensor)
            else:
                optimizer.set_state(parameter, key, part_of(name, tensor).reshape(parameter.shape))
    optimizer.repeat_schedule(saved.steps)
    for name, rate in optimizer.learning_rates().items():
        before = saved.value(f"{RATES}/{name}")
        if before is not None and not math.isclose(before, rate, rel_tol=1e-6, abs_tol=1e-30):
            raise DataError(
                f"checkpoint: parameter {name}: expected the learning rate {before:g} after "
                f"{saved.steps} steps of the schedule, got {rate:g}; a schedule must depend on the "
                "number of steps only"
            )


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the model's state, under their first names."""
    kept = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def join_elements(name: str, parts: Iterable[Elements]) -> Tensor:
    """Return the whole tensor of its parts, in logical order. Raises DataError for a gap."""
    ordered = sorted(parts, key=lambda part: part.start)
    first = ordered[0]
    size = math.prod(first.shape)
    if first.values.numel() == size:  # several ranks may give a whole one, for example a counter
        ordered = ordered[:1]
    stop = 0
    for part in ordered:
        same = (part.shape, part.strides, part.values.dtype)
        if part.start != stop or same != (first.shape, first.strides, first.values.dtype):
            break
        stop += part.values.numel()
    if stop != size or not _is_dense(first.shape, first.strides):
        raise DataError(f"checkpoint: {name}: its parts do not add up to one tensor")
    flat = first.values if len(ordered) == 1 else torch.cat([part.values for part in ordered])
    return flat.as_strided(first.shape, first.strides)


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether the elements fill consecutive memory, each once."""
    if len(shape) != len(strides):
        return False
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _json_value(name: str, value: object) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(
        f"{name}: a checkpoint contains tensors and numbers, got {type(value).__name__}; use "
        "another optimiser, or remove [checkpoint]"
    )
