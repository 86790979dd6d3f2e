"""Create the task of a training and its model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from paceline.data.source import Source
from paceline.errors import UsageError
from paceline.plan.trial import Training
from paceline.spec.extensions import WORKLOADS
from paceline.spec.sentences import sentences
from paceline.training.batch_norm import batch_norms
from paceline.training.dropout import use_sample_dropout
from paceline.training.task import Task, TaskSettings
from paceline.workloads.loading import load_task_class
from paceline.workloads.pretrained import load_pretrained


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
        faults = "; ".join(sentences(error.errors()))
        raise UsageError(f"options of {task_class.__name__}: {faults}") from error
