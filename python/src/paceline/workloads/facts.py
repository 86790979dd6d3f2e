"""Facts of a model, derived from the model itself on torch's meta device, without data."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paceline.data.dataset import open_dataset
from paceline.data.items import ItemSource
from paceline.data.row_groups import ParquetSource
from paceline.errors import PacelineError
from paceline.spec.model_facts import CLASSES, ModelFacts
from paceline.training.batch_norm import batch_norms
from paceline.workloads.build import informed, make_task, on_meta_device
from paceline.workloads.conditions import (
    STEPS,
    loss_fault,
    sharding_fault,
    small_parameters,
    splitting_fault,
    unused_parameter,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from paceline.data.source import Source
    from paceline.training.task import Task


def derive_facts(
    task_path: str, options: Mapping[str, Any] | None = None, data: str = "", samples: int = 0
) -> ModelFacts:
    """Return the facts of the model of a task ("module:Class" or "file.py:Class") with `CLASSES`
    classes.

    data: path or URL of the data set. Without one, samples are those of the task's `dataset()`,
    else images of the default size. samples: how many, for a synthetic one.
    """
    task = make_task(
        task_path, classes=CLASSES, steps=STEPS, options=options or {}, samples=samples
    )
    items = None if data else task.dataset()
    source: Source | None = None
    if items is not None:
        source = ItemSource(items, len(items))
    elif data:
        # A missing data set or field is reported later; it may exist on the cluster only.
        with suppress(PacelineError):
            source = _source(task, data)
    if source is not None:
        task = informed(task, source, classes=CLASSES)
    built = on_meta_device(task)
    parameters = list(built.parameters())
    unsplit = splitting_fault(task, built)
    layers = () if unsplit else tuple(task.blocks(built))
    return ModelFacts(
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        split_points=tuple(legal_split_points(layers)),
        batch_norms=tuple(batch_norms(built)),
        input_field=task.input_field,
        target_field=task.target_field,
        items=None if items is None else len(items),
        target=task.target,
        optimizer=type(task.optimizer(small_parameters(built))).__name__,
        clip_norm=task.clip_norm,
        tied_layers=tuple(tied_layers(layers)),
        unused_parameter=unused_parameter(task, built),
        splitting_fault=unsplit,
        sharding_fault=sharding_fault(task, built),
        loss_fault=None if source is None else loss_fault(task, built, source.targets),
    )


def _source(task: Task, data: str) -> ParquetSource:
    return ParquetSource(
        open_dataset(data),
        task.input_field,
        task.target_field,
        image_size=task.settings.image_size,
    )


def legal_split_points(layers: Sequence[tuple[str, nn.Module]]) -> list[int]:
    """Return the indexes of the layers at which a pipeline stage may begin.

    A stage cannot begin at a layer that works in place: it would overwrite what it received, and
    splitting after it costs the same.
    """
    return [i for i in range(1, len(layers)) if not getattr(layers[i][1], "inplace", False)]


def tied_layers(layers: Sequence[tuple[str, nn.Module]]) -> list[tuple[int, int]]:
    """Return the indexes of the first and the last of the layers that share a trained parameter."""
    users: dict[int, list[int]] = {}
    for index, (_, layer) in enumerate(layers):
        for parameter in layer.parameters():
            if parameter.requires_grad:
                users.setdefault(id(parameter), []).append(index)
    return sorted({(used[0], used[-1]) for used in users.values() if used[0] < used[-1]})
