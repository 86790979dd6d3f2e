"""Create the task of a training and its model: its class, its settings, and pretrained weights.

The built-in workloads read their initial weights from a file that an option names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import pickle
import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.base.errors import DataError, EnvironmentLacks, UsageError
from paceline.plan.spec.extensions import WORKLOADS
from paceline.plan.spec.sentences import first_of, no_such_key, sentences
from paceline.plan.spec.workloads import split_task_path
from paceline.plan.trials.trial import Training
from paceline.train.data.batches import Source
from paceline.train.training.batch_norm import batch_norms
from paceline.train.training.dropout import use_sample_dropout
from paceline.train.training.task import Task, TaskOptions, TaskSettings


class BuiltInOptions(TaskOptions):
    """weights: file with initial weights by the model's names. new_parameters: shell patterns of
    names that only the model or only the file may have."""

    weights: str | None = None
    new_parameters: tuple[str, ...] = ()


class BuiltInTask(Task):
    """A task whose initial weights an option can name."""

    Options = BuiltInOptions

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        self.new_parameters = self.options.new_parameters

    def pretrained(self) -> str | None:
        return self.options.weights  # type: ignore[no-any-return]  # of the model of options


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
    patterns = task.new_parameters
    is_new = {n for n in {*state, *found} if any(fnmatchcase(n, each) for each in patterns)}
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
        f"{what}: {first_of(names, _MOST_NAMED)}"
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


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def load_task_class(
    path: str, *, folder: Path | None = None, sha256: str | None = None
) -> type[Task]:
    """Return the class that "module:Class" or "file.py:Class" names.

    folder: of the trial; a copy of the file in it is preferred. sha256: expected checksum of the
    file. Raises UsageError if file or class does not exist, if the file has changed, or if the
    class is not a Task; EnvironmentLacks if the module cannot be imported.
    """
    place, name = split_task_path(path)
    here = str(Path.cwd())  # may have the task and what it imports; last, to replace no library
    if here not in sys.path:
        sys.path.append(here)
    try:
        if place.endswith(".py"):
            copy = None if folder is None else folder / Path(place).name
            file = copy if copy is not None and copy.is_file() else Path(place)
            module = _import_file(file, sha256)
        else:
            module = importlib.import_module(place)
    except UsageError:
        raise
    except Exception as error:
        raise EnvironmentLacks(
            f"task {path}: expected a module that can be imported, got {type(error).__name__}: "
            f"{error}"
        ) from error
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, Task):
        return found
    raise UsageError(
        f"task {path}: expected a subclass of paceline.Task with the name {name}, found "
        f"{'none' if found is None else type(found).__name__}; the file has {_task_names(module)}"
    )


def _import_file(file: Path, sha256: str | None) -> ModuleType:
    """Import a user's file under a name of its own, once for each content."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(
            f"task: expected the file {file}, got: {error.strerror}; give its path relative to the "
            "current directory"
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise UsageError(
            f"task: {file} has changed since the trial was planned (expected sha256 {sha256}, "
            f"found {found}); plan the run again"
        )
    name = f"paceline_task_{found[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _task_names(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Task) and value is not Task
    ]
    return ", ".join(names) or "no task"


def make_task(name: str, **settings: Any) -> Task:
    """Return the task of a workload, or of a class "module:Class" or "file.py:Class".

    settings: values of TaskSettings. Raises UsageError for an unknown workload or class, or for
    options that the task does not allow.
    """
    path = name if ":" in name else WORKLOADS.get(name).implementation
    return _created(load_task_class(path), TaskSettings(**settings))


def task_of(
    training: Training, *, classes: int, steps: int = 1, folder: Path | None = None
) -> Task:
    """Return the task of a planned training.

    classes: number of class names in the data set. steps: optimiser steps of the whole training.
    folder: of the trial, which holds a copy of a user's file.
    """
    path = training.task or WORKLOADS.get(training.workload).implementation
    task_class = load_task_class(path, folder=folder, sha256=training.task_sha256)
    settings = TaskSettings(
        classes=classes,
        samples=training.items or 0,
        image_size=training.image_size,
        learning_rate=training.learning_rate,
        learning_rate_warmup_steps=training.learning_rate_warmup_steps,
        momentum=training.momentum,
        dropout=training.dropout,
        seed=training.seed,
        steps=steps,
        memory_format=training.memory_format,
        accumulation_steps=training.accumulation_steps,
        options=training.options,
    )
    return _created(task_class, settings)


def informed(task: Task, source: Source, classes: int) -> Task:
    """Return the task with the facts of its data set."""
    settings = dataclasses.replace(
        task.settings,
        classes=classes,
        input_shape=source.inputs.shape,
        input_dtype=str(source.inputs.dtype),
    )
    return type(task)(settings)


def build_model(task: Task) -> nn.Module:
    """Return the model with its initial weights, in training mode, on the CPU.

    The weights are a function of the task's settings: torch's generator draws them one after the
    other for any number of threads, and the state of the caller's generator neither matters nor
    changes. Raises UsageError if the model cannot be trained.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(task.settings.seed)
        model = task.model()
    _refuse_empty(task, model)
    load_pretrained(task, model)
    _adapt(task, model)
    return model


def on_meta_device(task: Task) -> nn.Module:
    """Return the model without memory for its weights, and without drawing them."""
    with torch.device("meta"):
        model = task.model()
    _adapt(task, model)
    return model


def _refuse_empty(task: Task, model: nn.Module) -> None:
    """Raise UsageError for a parameter without elements, on which loss or strategy would fail."""
    empty = next((name for name, p in model.named_parameters() if p.numel() == 0), None)
    if empty is None:
        return
    found = f"{type(task).__name__}.model: expected parameters with elements, but {empty} has none"
    if task.settings.classes == 0:
        found += (
            "; self.settings.classes is 0, because the data set does not state its classes: give "
            "the number in the model, or in an option of the task"
        )
    raise UsageError(found)


def _adapt(task: Task, model: nn.Module) -> None:
    """Make the model compute the same in every layout; raise UsageError if it cannot."""
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            f"{type(task).__name__}.model: expected at least one parameter to train, but none has "
            "requires_grad=True"
        )
    use_sample_dropout(model, enabled=task.settings.dropout)
    sparse = [name for name, m in model.named_modules() if getattr(m, "sparse", False) is True]
    if sparse:
        raise UsageError(
            f"layer {sparse[0]}: its gradient is sparse, which no reduction can sum; expected "
            "sparse=False"
        )
    names = list(batch_norms(model))
    if names and task.accumulation_steps > 1:
        raise UsageError(
            f"layer {names[0]} normalises over the whole batch, so {type(task).__name__} cannot "
            f"divide it: expected accumulation_steps = 1, got {task.accumulation_steps}"
        )


def _created(task_class: type[Task], settings: TaskSettings) -> Task:
    try:
        return task_class(settings)
    except ValidationError as error:
        known = task_class.Options.model_fields
        faults = sentences(error.errors(), lambda place: no_such_key(str(place[-1]), known))
        raise UsageError(f"options of {task_class.__name__}: {'; '.join(faults)}") from error
