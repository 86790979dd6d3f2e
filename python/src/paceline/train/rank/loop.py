"""The training loop, the same for every launcher, and the result that the first rank writes."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.base.errors import RankFailed
from paceline.base.host.machine import SAME_CLOCK, ClockOffset
from paceline.measure.records.communication import Communication, StrategyResult, TransportResult
from paceline.measure.records.files import JsonlWriter, fields_of, write_json
from paceline.measure.records.layout import RankFiles, TrialFiles
from paceline.measure.records.rows import (
    RankWeights,
    Replayed,
    SampleLogRow,
    StepRow,
    TrainingResult,
    WorkerEnvironment,
)
from paceline.measure.records.sources import write_sources
from paceline.plan.trials.trial import RankContext, Trial
from paceline.train.training.batch_norm import batch_norms
from paceline.train.training.resources import actual_environment, check_environment
from paceline.train.training.strategy import GradientResult, Stepper, TrainBatch
from paceline.train.training.task import Task
from paceline.train.training.tensors import linear_parameters, save_tensors, update_l2
from paceline.train.workloads.build import on_meta_device

if TYPE_CHECKING:
    from paceline.plan.trials.sample_order import SampleOrder
    from paceline.train.data.batches import Batch


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
    """Write the actual environment of a rank, and the user's files that it has imported.

    Raises EnvironmentLacks if the environment is not as requested.

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
    write_sources(trial.training, files)


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


# --- the training loop, the same for every launcher, strategy and transport ----------------------

# Called with step and epoch; returns whether it used time, which then belongs to no step.
Evaluate = Callable[[int, int], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Runs the steps of a sample order on one rank, and records each step when it ends.

    counts_samples: whether this rank's samples belong to no other stage of the same replica.
    on_first_gradient: called after the first gradient of this loop is summed. on_update: called
    with the step when its weights are updated, as a part of it. on_step_end: called after the rows
    of a step are written.
    """

    order: SampleOrder
    task: Task
    strategy: Stepper
    rank: int
    counts_samples: bool
    on_first_gradient: Callable[[], None] = lambda: None
    on_update: Callable[[int], None] = lambda _step: None
    on_step_end: Callable[[StepRow], None] = lambda _row: None

    def run(self, batches: Iterable[Batch], files: RankFiles, evaluate: Evaluate) -> int:
        """Train on `batches`, one for each step, and return the number of steps.

        evaluate: called after each step, when its rows are written.
        Raises RankFailed naming the step if the loss is not finite.
        """
        steps = 0
        with JsonlWriter(files.steps) as rows, JsonlWriter(files.sample_log) as sample_log:
            for row, seen in self.steps(batches, evaluate=evaluate):
                rows.write(row)
                sample_log.write(seen)
                self.on_step_end(row)
                steps += 1
        return steps

    def steps(
        self,
        batches: Iterable[Batch],
        started_s: float | None = None,
        evaluate: Evaluate = lambda _step, _epoch: False,
    ) -> Iterator[tuple[StepRow, SampleLogRow]]:
        """Take the steps one by one, for a caller that writes the rows.

        There is no gap between steps, except for evaluations and what is kept for the comparison
        with the baseline: time spent between two of them, for example on writing rows, belongs to
        the later one. started_s: start of the first step as time of perf_counter; default now.
        """
        source = iter(batches)
        unix_offset_s = time.time() - time.perf_counter()
        started_s = time.perf_counter() if started_s is None else started_s
        while (batch := next(source, None)) is not None:
            waited_s = time.perf_counter()
            row, started_s = self._step(batch, started_s, waited_s, unix_offset_s)
            yield (
                row,
                SampleLogRow(
                    step=batch.step,
                    epoch=batch.epoch,
                    sample_ids=batch.sample_ids.tolist() if self.counts_samples else [],
                ),
            )
            if evaluate(batch.step, batch.epoch):
                started_s = time.perf_counter()

    def _step(
        self, batch: Batch, started_s: float, waited_s: float, unix_offset_s: float
    ) -> tuple[StepRow, float]:
        global_samples = len(self.order.step(batch.step).sample_ids)
        train_batch = TrainBatch(
            step=batch.step,
            epoch=batch.epoch,
            inputs=self._to_input(batch),
            targets=torch.from_numpy(batch.targets),
            sample_ids=batch.sample_ids,
            global_samples=global_samples,
            is_last=batch.step == self.order.steps - 1,
        )
        result = self.strategy.gradient(train_batch)
        self._check_loss(batch.step, result)
        if batch.step == self.order.first_step:
            self.on_first_gradient()
        optimizing_s = time.perf_counter()
        within_step = self.strategy.step()
        stepped_s = time.perf_counter()
        self.on_update(batch.step)
        ended_s = time.perf_counter()
        step_s = ended_s - started_s
        data_wait_s = waited_s - started_s
        optimizer_s = stepped_s - optimizing_s
        gradient_s = result.forward_s + result.backward_s
        gradient_s += (result.bubble_s or 0.0) + (result.comm_s or 0.0)
        gradient_s += result.pass_comm_s or 0.0
        comm_ended_unix_s = None
        if within_step is not None:
            optimizer_s -= within_step.comm_s
            comm_ended_unix_s = within_step.comm_ended_unix_s
            result = replace(
                result,
                comm_s=(result.comm_s or 0.0) + within_step.comm_s,
                comm_ready_unix_s=within_step.comm_ready_unix_s,
            )
        row = StepRow(
            step=batch.step,
            epoch=batch.epoch,
            started_unix_s=started_s + unix_offset_s,
            samples=len(batch.sample_ids) if self.counts_samples else 0,
            global_samples=global_samples,
            data_wait_s=data_wait_s,
            optimizer_s=optimizer_s,
            other_s=step_s - data_wait_s - gradient_s - (stepped_s - optimizing_s),
            step_s=step_s,
            comm_ended_unix_s=comm_ended_unix_s,
            **fields_of(result),
        )
        return row, ended_s

    def _to_input(self, batch: Batch) -> Tensor:
        """Convert the stored inputs of a batch, shape (n, ...), to `TrainBatch.inputs`."""
        samples = batch.inputs
        if samples is None:
            return torch.empty(len(batch.sample_ids), 0)
        inputs = self.task.empty_input(samples)

        def convert(part: slice) -> None:
            if part.start < part.stop:  # a rank or a replica may have no sample
                self.task.fill_input(samples[part], inputs[part])

        self.strategy.for_parts(len(samples), convert)
        return inputs

    def _check_loss(self, step: int, result: GradientResult) -> None:
        if not math.isfinite(result.loss_sum):
            raise RankFailed(
                f"rank {self.rank}: the loss of step {step} is {result.loss_sum}, expected a "
                f"finite number: the training diverged; lower learning_rate "
                f"({self.task.settings.learning_rate:g}) or use precision fp32",
                self.rank,
            )
