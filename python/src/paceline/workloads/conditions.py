"""Conditions that a task must meet for some local strategies, checked without training it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.training.batch_norm import batch_norms
from paceline.training.loss import summed_loss
from paceline.training.modes import evaluating
from paceline.training.optimizers import TaskOptimizer, trained_parameters

if TYPE_CHECKING:
    from paceline.data.source import Values
    from paceline.training.task import NamedParameters, Task

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
    whole = small_parameters(model)
    halves = [half for named in whole for half in _halves(*named)]
    initial = {name: p.detach().clone() for name, p in whole}
    _train(task, whole, [name for name, _ in whole])
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
            example = task.example_input().to("meta")
            model(example.expand(2, *example.shape[1:])).float().sum().backward()
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
            example = task.example_input().to("meta")
            outputs = model(example.expand(2, *example.shape[1:]))
            wanted = torch.zeros((2, *targets.shape), dtype=kind, device="meta")
            summed_loss(task, outputs, wanted)
    except UsageError as error:
        return str(error)
    except Exception:  # noqa: BLE001  (the code of a user; the training finds it, too)
        return None
    return None


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
