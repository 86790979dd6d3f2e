"""Forward and backward passes of one replica for its part of a batch: precision, mode and loss."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from paceline.base.errors import UsageError
from paceline.collectives.device_clock import unix_s
from paceline.collectives.message_schedules import share_bounds
from paceline.collectives.recorder import PassCommunication
from paceline.plan.trials.trial import Training
from paceline.train.training.batch_norm import placeholders
from paceline.train.training.devices import CPU, InputMover, Stopwatch
from paceline.train.training.dropout import set_sample_keys
from paceline.train.training.strategy import GradientResult, TrainBatch
from paceline.train.training.task import Task

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def working_dtype(training: Training) -> torch.dtype:
    """Return the type in which large operations compute."""
    return _TYPES[training.precision]


def autocast(training: Training, device: str = "cpu") -> AbstractContextManager[object]:
    """Return a context with lower precision on a device type, if the training requests it. It
    applies to the thread that enters it."""
    if training.precision == "fp32":
        return nullcontext()
    return torch.autocast(device, dtype=working_dtype(training))


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
    # communication of layers in the forward and in the backward pass; None without such layers
    comm_s: tuple[float, float] | None = None

    @property
    def own_ready_s(self) -> float:
        """When the last gradient would have been ready without communication of layers."""
        return self.ready_s - sum(self.comm_s or ())

    def result(self, *, alone: bool) -> GradientResult:
        """Return the result of a gradient whose sum over all replicas is ready now.

        alone: there is no other replica, so all the time since the passes belongs to them.
        """
        now_s = time.perf_counter()
        ready_s = now_s if alone else self.ready_s
        forward_comm_s, backward_comm_s = self.comm_s or (0.0, 0.0)
        return GradientResult(
            loss_sum=self.loss_sum,
            forward_s=self.forwarded_s - self.started_s - forward_comm_s,
            backward_s=ready_s - self.forwarded_s - backward_comm_s,
            comm_s=None if alone else now_s - ready_s,
            comm_ready_unix_s=None if alone else unix_s(ready_s),
            pass_comm_s=None if self.comm_s is None else forward_comm_s + backward_comm_s,
        )


def parts_of(task: Task, batch: TrainBatch) -> list[TrainBatch]:
    """Return the parts of a batch that the task's gradient accumulation processes one after the
    other. Only a single part can be empty."""
    count = max(1, min(task.accumulation_steps, len(batch.sample_ids)))
    return [share_of(batch, number, count) for number in range(count)]


def run_passes(  # noqa: PLR0913  (most replicas lack the last five)
    task: Task,
    model: nn.Module,
    batch: TrainBatch,
    training: Training,
    *,
    stopwatch: Stopwatch | None = None,
    mover: InputMover | None = None,
    accumulating: Callable[[], AbstractContextManager[None]] = nullcontext,
    communication: PassCommunication | None = None,
    scale: float = 1.0,
) -> Passes:
    """Run the forward and backward passes of a replica's part of a batch.

    Gradients are replaced by those of this part's contribution to the mean over
    `batch.global_samples`. stopwatch, mover: of the model's device; None means the CPU.
    accumulating: returns a context for each pass but the last, in which gradients are incomplete.
    communication: of the model's layers. scale: factor of the loss, and so of its gradients.
    """
    communicated = communication or PassCommunication()
    stopwatch = stopwatch or Stopwatch(CPU)
    started_s = stopwatch.start()
    model.zero_grad()
    one_pass = partial(_run_pass, task, model, training, stopwatch, mover, communicated, scale)
    done = []
    *first, last = parts_of(task, batch)
    for part in first:
        with accumulating():
            done.append(one_pass(part))
    done.append(one_pass(last))
    # As if all forward passes came first.
    begun_s = [passed.started_s for passed in done] if first else [started_s]
    forward_s = sum(passed.forwarded_s for passed in done) - sum(begun_s)
    forward_comm_s, backward_comm_s = zip(*(passed.comm_s or () for passed in done), strict=True)
    return Passes(
        loss_sum=sum(passed.loss_sum for passed in done),
        started_s=started_s,
        forwarded_s=started_s + forward_s,
        ready_s=done[-1].ready_s,
        comm_s=None if communication is None else (sum(forward_comm_s), sum(backward_comm_s)),
    )


def _run_pass(  # noqa: PLR0913, PLR0917  (bound by its only caller)
    task: Task,
    model: nn.Module,
    training: Training,
    stopwatch: Stopwatch,
    mover: InputMover | None,
    communication: PassCommunication,
    scale: float,
    batch: TrainBatch,
) -> Passes:
    """Run one forward and backward pass, which adds to the gradients."""
    started, before_s = stopwatch.mark(), communication.total_s
    if mover is not None:
        batch = replace(batch, inputs=mover.move(batch.inputs), targets=mover.move(batch.targets))
    loss = sum_of_losses(task, model, batch, training)
    forwarded, between_s = stopwatch.mark(), communication.total_s
    (scale * (loss.float() / batch.global_samples)).backward()  # type: ignore[no-untyped-call]
    ready_s = stopwatch.reached_s(stopwatch.mark())
    return Passes(
        float(loss.detach()),  # now, because a GPU would wait for it before the backward pass
        stopwatch.reached_s(started),
        stopwatch.reached_s(forwarded),
        ready_s,
        (between_s - before_s, communication.total_s - between_s),
    )


def sum_of_losses(task: Task, model: nn.Module, batch: TrainBatch, training: Training) -> Tensor:
    """Run the forward pass; return the sum of losses: a scalar with a graph, on the device of the
    tensors.

    An empty batch is replaced by one sample that does not count, so its gradients are all 0.
    """
    inputs = batch.inputs
    if len(batch.sample_ids) == 0:
        placeholder = inputs.new_zeros((1, *inputs.shape[1:]))
        set_sample_keys(model, training.seed, batch.epoch, np.zeros(1, dtype=np.int64))
        with placeholders(model), autocast(training, inputs.device.type):
            return no_loss(model(placeholder))
    set_sample_keys(model, training.seed, batch.epoch, batch.sample_ids)
    with autocast(training, inputs.device.type):
        return summed_loss(task, model(inputs), batch.targets)


def no_loss(outputs: Tensor) -> Tensor:
    """Return 0 with a graph that gives gradients of 0 to the outputs.

    The task's loss times 0 would be NaN where it is not finite for the values of a placeholder.
    """
    everything = torch.ones((), dtype=torch.bool, device=outputs.device)
    return outputs.float().masked_fill(everything, 0.0).sum()


def summed_loss(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the samples' losses for the outputs of the model.

    Raises UsageError if the task's loss does not have one value per sample.
    """
    losses = task.loss(outputs, targets)
    if losses.shape != (len(targets),):
        raise UsageError(
            f"{type(task).__name__}.loss: expected one loss for each of {len(targets)} samples, "
            f'shape ({len(targets)},), got shape {tuple(losses.shape)}; use reduction="none", and '
            "average over all other dimensions"
        )
    return losses.sum()
