"""Forward and backward passes of one replica for its part of a batch."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.plan.sample_order import share_bounds
from paceline.training.devices import CPU, InputMover, Stopwatch, unix_s
from paceline.training.loss import sum_of_losses
from paceline.training.strategy import GradientResult

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import nn

    from paceline.plan.trial import Training
    from paceline.training.strategy import TrainBatch
    from paceline.training.task import Task


def share_of(batch: TrainBatch, replica: int, replicas: int) -> TrainBatch:
    """Return the contiguous part of a rank's batch for one of its replicas; may be empty.

    Nothing is copied; the part keeps the memory format of the batch.
    """
    low, high = share_bounds(len(batch.sample_ids), replica, replicas)
    return replace(
        batch,
        inputs=batch.inputs[low:high],
        targets=batch.targets[low:high],
        sample_ids=batch.sample_ids[low:high],
    )


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of a replica; times of perf_counter."""

    loss_sum: float
    started_s: float
    forwarded_s: float
    ready_s: float  # when the last gradient was ready

    def result(self, *, alone: bool) -> GradientResult:
        """Return the result of a gradient whose sum over all replicas is ready now.

        alone: there is no other replica, so all the time since the passes belongs to them.
        """
        now_s = time.perf_counter()
        ready_s = now_s if alone else self.ready_s
        return GradientResult(
            loss_sum=self.loss_sum,
            forward_s=self.forwarded_s - self.started_s,
            backward_s=ready_s - self.forwarded_s,
            comm_s=None if alone else now_s - ready_s,
            comm_ready_unix_s=None if alone else unix_s(ready_s),
        )


def parts_of(task: Task, batch: TrainBatch) -> list[TrainBatch]:
    """Return the parts of a batch that the task's gradient accumulation processes one after the
    other. Only a single part can be empty."""
    count = max(1, min(task.accumulation_steps, len(batch.sample_ids)))
    return [share_of(batch, number, count) for number in range(count)]


def run_passes(
    task: Task,
    model: nn.Module,
    batch: TrainBatch,
    training: Training,
    stopwatch: Stopwatch | None = None,
    mover: InputMover | None = None,
    accumulating: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Passes:
    """Run the forward and backward passes of a replica's part of a batch.

    Gradients are replaced by those of this part's contribution to the mean over
    `batch.global_samples`. stopwatch, mover: of the model's device; None means the CPU.
    accumulating: returns a context for each pass but the last, in which gradients are incomplete.
    """
    stopwatch = stopwatch or Stopwatch(CPU)
    started_s = stopwatch.start()
    for parameter in model.parameters():
        parameter.grad = None
    loss_sum = forward_s = 0.0
    *first, last = parts_of(task, batch)
    for part in first:
        with accumulating():
            passed = _run_pass(task, model, part, training, stopwatch, mover)
        loss_sum += passed.loss_sum
        forward_s += passed.forwarded_s - passed.started_s
    passed = _run_pass(task, model, last, training, stopwatch, mover)
    # As if all forward passes came first.
    forward_s += passed.forwarded_s - (passed.started_s if first else started_s)
    return Passes(loss_sum + passed.loss_sum, started_s, started_s + forward_s, passed.ready_s)


def _run_pass(
    task: Task,
    model: nn.Module,
    batch: TrainBatch,
    training: Training,
    stopwatch: Stopwatch,
    mover: InputMover | None,
) -> Passes:
    """Run one forward and backward pass, which adds to the gradients."""
    started = stopwatch.mark()
    if mover is not None:
        batch = replace(batch, inputs=mover.move(batch.inputs), targets=mover.move(batch.targets))
    loss = sum_of_losses(task, model, batch, training)
    loss_sum = float(loss.detach())
    forwarded = stopwatch.mark()
    (loss / batch.global_samples).backward()  # type: ignore[no-untyped-call]
    ready_s = stopwatch.reached_s(stopwatch.mark())
    return Passes(loss_sum, stopwatch.reached_s(started), stopwatch.reached_s(forwarded), ready_s)
