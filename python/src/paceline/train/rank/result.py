"""The result of a training (`result.json`), written by the first rank of every kind of trial."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from paceline.base.host.clocks import SAME_CLOCK, ClockOffset
from paceline.measure.records.communication import Communication, StrategyResult, TransportResult
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RankFiles, TrialFiles
from paceline.measure.records.rows import RankWeights, Replayed, TrainingResult, WorkerEnvironment
from paceline.plan.trials.rank_context import RankContext
from paceline.plan.trials.trial import Trial
from paceline.train.training.batch_norm import batch_norms
from paceline.train.training.linear import linear_parameters
from paceline.train.training.resources import actual_environment, check_environment
from paceline.train.training.task import Task
from paceline.train.training.tensors import save_tensors, update_l2
from paceline.train.workloads.build import on_meta_device


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Facts about the end of any training."""

    steps: int
    weights_sha256: str
    strategy: StrategyResult = field(default_factory=StrategyResult)
    transport: TransportResult = field(default_factory=TransportResult)


def local_buffers(trial: Trial, task: Task) -> list[str]:
    """Return the buffers that each replica has of its own: running statistics of its samples."""
    if trial.training.batch_norm == "global":
        return []
    layers = batch_norms(on_meta_device(task))
    return [
        f"{name}.{buffer}" for name, layer in layers.items() for buffer, _ in layer.named_buffers()
    ]


def write_rank_weights(
    files: RankFiles,
    replicas: list[dict[str, str]],
    local: Sequence[str] = (),
    unchanged_after: list[int] | None = None,
) -> str:
    """Write the checksums of a rank's final weights, and return that of the whole model.

    Arguments: see RankWeights.
    """
    weights = RankWeights(replicas=replicas, local=list(local), unchanged_after=unchanged_after)
    write_json(files.weights, weights)
    return hashlib.sha256(repr(replicas[0]).encode()).hexdigest()


def write_environment(
    context: RankContext,
    trial: Trial,
    files: RankFiles,
    initial_weights_sha256: str,
    clock: ClockOffset = SAME_CLOCK,
    workers: Sequence[WorkerEnvironment] = (),
    first_batch_sha256: str | None = None,
) -> None:
    """Write the actual environment of a rank. Raises EnvironmentLacks if it is not as requested.

    first_batch_sha256: of a script, where samples are counted from its batches.
    """
    environment = actual_environment(
        context,
        trial,
        clock_offset_s=clock.offset_s,
        clock_error_s=clock.error_s,
        initial_weights_sha256=initial_weights_sha256,
        workers=workers,
    )
    check_environment(environment, trial)
    write_json(files.environment, replace(environment, first_batch_sha256=first_batch_sha256))


def _communication(trial: Trial, end: End) -> Communication:
    return {"transport": trial.transport, **end.transport, **end.strategy}


def write_task_result(
    trial: Trial,
    files: TrialFiles,
    end: End,
    task: Task,
    weights: Mapping[str, Tensor],
    initial: nn.Module,
    replay: Callable[[], Replayed] = Replayed,
) -> None:
    """Write the final weights, replay steps, and write the result of a task's training.

    initial: the model with its first weights. replay: changes the weights.
    """
    if trial.save_tensors:
        save_tensors(files.weights, weights)
    moved = update_l2(weights, initial.state_dict())
    result = TrainingResult(
        steps=end.steps,
        weights_sha256=end.weights_sha256,
        update_l2=moved,
        parameters=sum(p.numel() for p in initial.parameters()),
        linear_parameters=linear_parameters(initial),
        communication=_communication(trial, end),
        classes=task.settings.classes,
        input_shape=list(task.settings.input_shape or ()),
        input_dtype=task.settings.input_dtype,
        replayed=replay(),
    )
    write_json(files.result, result)


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
        communication=_communication(trial, end),
        not_compared=not_compared,
    )
    write_json(files.result, result)
