"""The result of a training (`result.json`), written by the first rank of every kind of trial."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from paceline.records.communication import StrategyResult, TransportResult
from paceline.records.files import write_json
from paceline.records.rows import TrainingResult
from paceline.training.linear import linear_parameters
from paceline.training.passes import run_passes
from paceline.training.tensors import save_tensors, update_l2
from paceline.workloads.build import build_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.plan.trial import Training, Trial
    from paceline.records.communication import Communication
    from paceline.records.layout import TrialFiles
    from paceline.training.strategy import TrainBatch
    from paceline.training.task import Task

# Relative change of the inputs: 16 units of roundoff of fp32. Roundings within the model add up to
# about as much, so that units switch in most batches in which another order of sums may switch one.
_CHANGE = 2.0**-20
_NOISE = 2.0**-13  # share of the whole gradient's norm below which a tensor's gradient is noise


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Facts about the end of any training."""

    steps: int
    weights_sha256: str
    strategy: StrategyResult = field(default_factory=StrategyResult)
    transport: TransportResult = field(default_factory=TransportResult)


def _communication(trial: Trial, end: End) -> Communication:
    return {"transport": trial.transport, **end.transport, **end.strategy}


def write_task_result(
    trial: Trial,
    files: TrialFiles,
    end: End,
    task: Task,
    weights: dict[str, Tensor],
    first_batch: TrainBatch | None = None,
) -> None:
    """Write the final weights and the result of a task's training.

    first_batch: to measure the sensitivity of the first gradient; None if it is not needed.
    """
    if trial.save_tensors:
        save_tensors(files.weights, weights)
    initial = build_model(task)
    moved = update_l2(weights, initial.state_dict())
    sensitivity = None
    if first_batch is not None:
        sensitivity = gradient_sensitivity(task, initial, first_batch, trial.training)
    result = TrainingResult(
        steps=end.steps,
        weights_sha256=end.weights_sha256,
        update_l2=moved,
        parameters=sum(p.numel() for p in initial.parameters()),
        linear_parameters=linear_parameters(initial),
        communication=_communication(trial, end),
        gradient_sensitivity=sensitivity,
        not_compared=None,
        classes=task.settings.classes,
        input_shape=list(task.settings.input_shape or ()),
        input_dtype=task.settings.input_dtype,
    )
    write_json(files.result, asdict(result))


def write_script_result(
    trial: Trial,
    files: TrialFiles,
    end: End,
    *,
    parameters: int,
    moved: dict[str, float],
    not_compared: str | None,
) -> None:
    """Write the result of a user's script, whose model and data set are unknown.

    parameters: their number. moved: see TrainingResult.update_l2. not_compared: why its tensors
    cannot be compared.
    """
    result = TrainingResult(
        steps=end.steps,
        weights_sha256=end.weights_sha256,
        update_l2=moved,
        parameters=parameters,
        linear_parameters=None,
        communication=_communication(trial, end),
        gradient_sensitivity=None,
        not_compared=not_compared,
        classes=None,
        input_shape=None,
        input_dtype=None,
    )
    write_json(files.result, asdict(result))


def gradient_sensitivity(
    task: Task, model: nn.Module, batch: TrainBatch, training: Training
) -> float:
    """Return how much the gradient changes with the last bits of the inputs.

    A unit of ReLU whose input is nearly zero switches with the last bits of its input. Where layers
    normalise, a single unit may move gradients by some thousandths of their norm. The value is
    the largest change of a tensor, relative to its norm.

    model: with initial weights, on the CPU; its gradients and running statistics are replaced.
    batch: with floating-point inputs.
    """
    generator = torch.Generator().manual_seed(training.seed)
    noise = torch.randn(batch.inputs.shape, generator=generator)
    changed = replace(batch, inputs=batch.inputs * (1 + _CHANGE * noise))
    plain, other = (_gradients(task, model, each, training) for each in (batch, changed))
    whole = float(torch.stack([tensor.norm() for tensor in plain]).norm())
    if whole == 0:
        return 0.0  # nothing to compare changes with
    return max(
        float((b - a).norm() / (a.norm() + _NOISE * whole))
        for a, b in zip(plain, other, strict=True)
    )


def _gradients(task: Task, model: nn.Module, batch: TrainBatch, training: Training) -> list[Tensor]:
    run_passes(task, model, batch, training)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
