"""Pretrained weights of a task, from a safetensors file or a file of torch."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.errors import DataError, UsageError

if TYPE_CHECKING:
    from paceline.training.task import Task

_MOST_NAMED = 5  # names in a message


def load_pretrained(task: Task, model: nn.Module) -> None:
    """Copy the weights of the task's file into the model; do nothing without a file.

    Raises UsageError if there is no such file, or if its names or shapes are not those of the
    model; DataError if it cannot be read.
    """
    given = task.pretrained()
    if given is None:
        return
    path = Path(given)
    found = _read(path, type(task).__name__)
    state = model.state_dict()
    is_new = {name for name in {*state, *found} if _matches(name, task.new_parameters)}
    # tied weights have several names, of which a file may have one
    places = {t.data_ptr() for name, t in state.items() if name in found and t.numel()}
    missing = [
        name
        for name, tensor in state.items()
        if name not in found and name not in is_new and tensor.data_ptr() not in places
    ]
    other = [name for name in found if name not in state and name not in is_new]
    shapes = [
        f"{name} ({_shape(found[name])} instead of {_shape(tensor)})"
        for name, tensor in state.items()
        if name in found and name not in is_new and found[name].shape != tensor.shape
    ]
    faults = [
        f"{what}: {_listed(names)}"
        for what, names in (
            ("missing in the file", missing),
            ("only in the file", other),
            ("of another shape", shapes),
        )
        if names
    ]
    if faults:
        raise UsageError(
            f"{type(task).__name__}.pretrained: {path} has other weights than the model; "
            f"{'; '.join(faults)}. Rename them, or name those that are new in new_parameters"
        )
    model.load_state_dict({n: t for n, t in found.items() if n not in is_new}, strict=False)


def _read(path: Path, task: str) -> Mapping[str, Tensor]:
    if not path.is_file():
        raise UsageError(
            f"{task}.pretrained: expected the file {path}, found none; give a path that every node "
            "sees"
        )
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (
        SafetensorError,
        pickle.UnpicklingError,
        EOFError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(
            f"{task}.pretrained: {path}: expected a safetensors file, or a file of torch.save with "
            f"tensors only: {reason}"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise DataError(
            f"{task}.pretrained: {path}: expected a dictionary of tensors by name, as of "
            "model.state_dict()"
        )
    return found


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
