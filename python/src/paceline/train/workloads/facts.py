"""Facts of a model, derived from the model itself on torch's meta device, without data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.base.errors import PacelineError, UsageError
from paceline.base.torch_internals import RandomOperations
from paceline.plan.spec.model_facts import CLASSES, ModelFacts
from paceline.train.data.batches import Source, Values
from paceline.train.data.dataset import open_dataset
from paceline.train.data.items import ItemSource
from paceline.train.data.row_groups import ParquetSource
from paceline.train.training.batch_norm import batch_norms
from paceline.train.training.dropout import set_sample_keys
from paceline.train.training.optimizers import TaskOptimizer, trained_parameters
from paceline.train.training.passes import summed_loss
from paceline.train.training.task import NamedParameters, Task
from paceline.train.training.tensors import evaluating
from paceline.train.workloads.build import informed, make_task, on_meta_device


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
            source = ParquetSource(
                open_dataset(data),
                task.input_field,
                task.target_field,
                image_size=task.settings.image_size,
            )
    if source is not None:
        task = informed(task, source, classes=CLASSES)
    built = on_meta_device(task)
    parameters = list(built.parameters())
    unsplit = splitting_fault(task, built)
    layers = () if unsplit else tuple(task.blocks(built))
    return ModelFacts(
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.nbytes for p in parameters),
        split_points=tuple(legal_split_points(layers)),
        batch_norms=tuple(batch_norms(built)),
        batch_norms_of_several=batch_norms_of_several(task, built),
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


def batch_norms_of_several(task: Task, model: nn.Module) -> tuple[str, ...]:
    """Return the layers that cannot normalise a single sample; none if a pass cannot tell.

    Raises UsageError if a training pass draws random numbers of its own. model: on the meta device,
    in training mode.
    """
    found: dict[str, None] = {}

    def note(name: str, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].numel() == inputs[0].shape[0] * inputs[0].shape[1]:
            found[name] = None

    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs))
        for name, layer in batch_norms(model).items()
    ]
    set_sample_keys(model, _SEED, 0, range(2))
    random = RandomOperations()
    # the code of a user; the training finds its faults, too
    with suppress(Exception), random, torch.no_grad():
        _outputs_of_two(task, model)
    for hook in hooks:
        hook.remove()
    if random.first is not None:
        raise UsageError(
            f"{type(task).__name__}.model: its forward draws random numbers ({random.first}), so "
            "no two layouts train alike; use nn.Dropout, whose masks belong to the samples, not "
            "torch.nn.functional.dropout or dropout_p"
        )
    return tuple(found)


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


STEPS = 3  # that a check takes; a schedule may not allow more than the training has
_SEED = 1
# Relative to a step; a different update differs by about as much as the step itself.
_TOLERANCE = 1e-3


def splitting_fault(task: Task, model: nn.Module) -> str | None:
    """Return why a pipeline cannot split the model; None if it can."""
    try:
        blocks = task.blocks(model)
    except UsageError as error:
        return str(error)
    named = {id(p): name for name, p in model.named_parameters()}
    found = {id(p): f"{name}.{own}" for name, b in blocks for own, p in b.named_parameters()}
    wrong = [name for key, name in named.items() if key not in found]
    wrong += [name for key, name in found.items() if key not in named]
    layers = dict(model.named_modules())
    misnamed = [name for name, b in blocks if type(b) is nn.Linear and layers.get(name) is not b]
    if wrong:
        return (
            f"{type(task).__name__}.blocks: expected every parameter of the model and no others; "
            f"{', '.join(sorted(wrong)[:3])} is missing or additional"
        )
    if misnamed:
        return (
            f"{type(task).__name__}.blocks: expected layers under their own names in the model, "
            f"got {', '.join(misnamed[:3])}"
        )
    users = Counter(id(layer) for _, block in blocks for layer in batch_norms(block).values())
    repeated = [name for name, layer in batch_norms(model).items() if users[id(layer)] > 1]
    if repeated:  # two stages would have statistics of their own
        return (
            f"{type(task).__name__}.blocks: expected batch normalisation in one block each, got "
            f"{repeated[0]} in several; use a layer of its own for each"
        )
    return None


def sharding_fault(task: Task, model: nn.Module) -> str | None:
    """Return why workers cannot update shards of the parameters; None if they can.

    A few steps with random gradients are taken on small parameters with the model's names, once
    whole and once in halves. An element-wise optimiser gives equal results.
    """
    odd = next((n for n, p in trained_parameters(model).items() if p.dtype != torch.float32), None)
    if odd is not None:
        dtype = model.get_parameter(odd).dtype
        return f"parameter {odd} is {dtype}, expected torch.float32; use .float() in the model"
    whole = small_parameters(model)
    halves = [half for named in whole for half in _halves(*named)]
    initial = {name: p.detach().clone() for name, p in whole}
    try:
        _train(task, whole, [name for name, _ in whole])
    except TypeError as error:
        raise UsageError(
            f"{type(task).__name__}: its optimiser or its schedule cannot take a step ({error}); "
            "expected ones whose step() needs no argument, neither a closure nor a metric"
        ) from error
    try:
        for worker in range(2):
            own = halves[worker::2]
            _train(task, own, [name for name, _ in whole], worker)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return f"its optimiser cannot update a part of a parameter: {error}"
    for (name, parameter), (_, low), (_, high) in zip(
        whole, halves[::2], halves[1::2], strict=True
    ):
        joined = torch.cat([low.detach(), high.detach()])
        moved = (parameter.detach() - initial[name]).norm()
        if (joined - parameter.detach().flatten()).norm() > _TOLERANCE * moved:
            return (
                f"its optimiser updates a part of parameter {name} differently from the whole; "
                "use an element-wise one (SGD, Adam, AdamW, RMSprop, Adagrad), and choose "
                "parameter groups by name"
            )
    return None


def unused_parameter(task: Task, model: nn.Module) -> str | None:
    """Return a trained parameter on which the output of the model does not depend.

    None if there is none, or if a pass without values cannot tell. model: on the meta device.
    """
    try:
        with evaluating(model):
            _outputs_of_two(task, model).float().sum().backward()  # type: ignore[no-untyped-call]
    except Exception:  # noqa: BLE001  (the code of a user; the training finds it, too)
        return None
    trained = trained_parameters(model)
    unused = [name for name, parameter in trained.items() if parameter.grad is None]
    model.zero_grad()
    return unused[0] if unused else None


def loss_fault(task: Task, model: nn.Module, targets: Values) -> str | None:
    """Return why the loss of two samples is not one value per sample.

    None if it is, or if a pass without values cannot tell. model: on the meta device.
    """
    kind = torch.float32 if np.dtype(targets.dtype).kind == "f" else torch.int64
    try:
        with evaluating(model), torch.no_grad():
            outputs = _outputs_of_two(task, model)
            wanted = torch.zeros((2, *targets.shape), dtype=kind, device="meta")
            summed_loss(task, outputs, wanted)
    except UsageError as error:
        return str(error)
    except Exception:  # noqa: BLE001  (the code of a user; the training finds it, too)
        return None
    return None


def _outputs_of_two(task: Task, model: nn.Module) -> Tensor:
    """Return the outputs of a model on the meta device for two samples."""
    example = task.example_input().to("meta")
    outputs: Tensor = model(example.expand(2, *example.shape[1:]))
    return outputs


def small_parameters(model: nn.Module) -> NamedParameters:
    """Return parameters with few elements, of the names and numbers of dimensions of those that
    are trained."""
    generator = torch.Generator().manual_seed(_SEED)
    return [
        (name, nn.Parameter(torch.randn((2,) * max(1, p.dim()), generator=generator)))
        for name, p in trained_parameters(model).items()
    ]


def _halves(name: str, parameter: Tensor) -> NamedParameters:
    flat = parameter.detach().flatten()
    return [(name, nn.Parameter(half.clone())) for half in flat.chunk(2)]


def _train(
    task: Task, parameters: NamedParameters, names: list[str], worker: int | None = None
) -> None:
    """Take some steps; worker: half of each gradient that the parameters get."""
    optimizer = TaskOptimizer(task, parameters)
    for step in range(STEPS):
        for name, parameter in parameters:
            generator = torch.Generator().manual_seed(1000 * step + names.index(name))
            if worker is None:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            else:
                whole = torch.randn(2 * parameter.numel(), generator=generator)
                parameter.grad = whole.chunk(2)[worker].clone()
        optimizer.step(squared_norm=0.0)  # clipping uses the norm of all parameters anyway
