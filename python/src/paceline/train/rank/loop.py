"""The training loop, the same for every launcher, strategy and transport."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.base.errors import RankFailed
from paceline.measure.records.files import JsonlWriter, fields_of
from paceline.measure.records.layout import RankFiles
from paceline.measure.records.rows import SampleLogRow, StepRow
from paceline.train.training.strategy import GradientResult, Stepper, TrainBatch

if TYPE_CHECKING:
    from paceline.plan.trials.sample_order import SampleOrder
    from paceline.train.data.reading import Batch
    from paceline.train.training.task import Task

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
