"""A stage that updates its weights after every micro-batch, without a flush (PipeDream).

Narayanan et al.: PipeDream: Generalized Pipeline Parallelism for DNN Training (SOSP 2019). The
order of passes is that of 1F1B, but the pipeline never drains between two steps. After the backward
pass of a micro-batch the stage updates its weights with it. So a later micro-batch in flight would
meet other weights in its backward pass than in its forward pass. Therefore the stage keeps the
weights of every micro-batch in flight (weight stashing, section 3.3).

With s stages, stage k computes the gradient of a micro-batch with weights that are s - 1 - k
updates old when it is applied. With vertical sync they are s - 1 updates old in every stage: all
stages use the version that the first stage used. The order is fixed, so the result is
deterministic, unlike that of other asynchronous training; but it is not equivalent to the baseline.

An update of a micro-batch has its part of the learning rate (TaskOptimizer.step_part).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.plan.sample_order import share_bounds
from paceline.records.rows import UpdateRow, own_update
from paceline.strategies.pipeline.schedules import Forward, drain_actions, stream_actions
from paceline.strategies.pipeline.stage import StageLayers, StageTimer
from paceline.training.devices import CPU

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.plan.trial import Training
    from paceline.strategies.pipeline.links import SplitPoint
    from paceline.strategies.pipeline.split_points import Layers
    from paceline.strategies.pipeline.stage_weights import StageWeights, WeightStash
    from paceline.training.strategy import GradientResult, TrainBatch
    from paceline.training.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlace:
    """Position of a stage in a pipeline that is never drained."""

    stage: int
    stages: int
    micro_batches: int  # of a step
    vertical_sync: bool

    @property
    def ahead(self) -> int:
        """Micro-batches whose forward passes precede the backward pass of an earlier one."""
        return self.stages - 1 - self.stage

    @property
    def delay(self) -> int:
        """Updates between the forward pass of a micro-batch and its own update."""
        return self.stages - 1 if self.vertical_sync else self.ahead

    @property
    def stashed_versions(self) -> int:
        """Largest number of copies of the stage's weights."""
        return self.delay + 1 if self.delay else 0


@dataclass(frozen=True, slots=True)
class _Pass:
    """The forward pass of a micro-batch in flight. `result` is None without samples."""

    received: Tensor | None
    result: Tensor | None
    samples: int
    share: float  # of the batch
    version: int


class StreamStage(StageLayers):
    """A stage that updates its weights with the gradient of each micro-batch."""

    def __init__(
        self,
        task: Task,
        layers: Layers,
        place: StreamPlace,
        before: SplitPoint | None,
        after: SplitPoint | None,
        training: Training,
    ) -> None:
        super().__init__(task, [layer for _, layer in layers], before, after, training)
        self._place = place
        self._passes: dict[int, _Pass] = {}
        self._weights: StageWeights
        self._stash: WeightStash
        self._drained_before = 0  # the first micro-batch since the last drain
        self._rows: list[UpdateRow] = []

    def update(self, weights: StageWeights) -> None:
        """Update these weights, which are those of the layers, from now on."""
        self._weights, self._stash = weights, weights.stash()

    def run(self, batch: TrainBatch) -> GradientResult:
        """Start all micro-batches of a batch, and finish those that are due; after the last batch,
        all of them."""
        timer = StageTimer(CPU)
        self._loss_sum = 0.0
        place = self._place
        for action in stream_actions(
            place.ahead, place.micro_batches, batch.step, drained_before=self._drained_before
        ):
            if isinstance(action, Forward):
                self._forward(action.micro_batch, batch, timer)
            else:
                self._backward(action.micro_batch, timer)
        if batch.is_last:
            self._drain(batch.step + 1, timer)
        self._stash.use_current()
        timer.ended("backward")
        return timer.result(self._loss_sum)

    def drain(self, steps: int) -> None:
        """Finish all micro-batches of the steps so far."""
        self._drain(steps, StageTimer(CPU))
        self._stash.use_current()

    def begin_after(self, steps: int) -> None:
        """Begin as after a drain, with the weights after so many steps."""
        self._drained_before = self._stash.version = steps * self._place.micro_batches

    def _drain(self, steps: int, timer: StageTimer) -> None:
        end = steps * self._place.micro_batches
        for action in drain_actions(self._place.ahead, end, drained_before=self._drained_before):
            self._backward(action.micro_batch, timer)
        self._drained_before = end

    def take_rows(self) -> list[UpdateRow]:
        """Return the rows of the updates since the last call."""
        rows, self._rows = self._rows, []
        return rows

    @property
    def stashed_versions(self) -> int:
        """Largest number of copies of the weights so far."""
        return self._stash.most_copies

    def _forward(self, number: int, batch: TrainBatch, timer: StageTimer) -> None:
        place = self._place
        slot = number % place.micro_batches
        low, high = share_bounds(len(batch.sample_ids), slot, place.micro_batches)
        version = self._stash.version
        if place.vertical_sync:
            version = max(self._drained_before, number - place.delay)
        received = None
        if self._before is not None:
            self._await_activations(self._before, slot, timer)
            if high > low:  # a copy, because the slot is filled again before the backward pass
                received = self._before.activations.received(slot, high - low).clone()
                received.requires_grad_()
            if slot == place.micro_batches - 1:
                self._before.activations.release()
        output = None
        if place.delay:
            self._stash.begin(version)
        if high > low:
            inputs = batch.inputs[low:high] if received is None else received
            output = self._output(inputs, batch, low, high)
        share = (high - low) / batch.global_samples
        self._passes[number] = _Pass(received, output, high - low, share, version)
        self._send_activations(slot, output, timer)

    def _backward(self, number: int, timer: StageTimer) -> None:
        place = self._place
        slot = number % place.micro_batches
        done = self._passes.pop(number)
        gradient = self._received_gradient(slot, done.samples, timer)
        if done.result is not None and done.result.requires_grad:
            if place.delay:
                self._stash.use(done.version)
            self._module.zero_grad()
            torch.autograd.backward(done.result, gradient)
        if self._after is not None and slot == place.micro_batches - 1:
            self._after.gradients.release()
        self._send_gradient(slot, done.received, timer)
        self._apply(number, done)
        timer.ended("backward")

    def _apply(self, number: int, done: _Pass) -> None:
        """Update the weights with the gradients of a micro-batch."""
        place, stash = self._place, self._stash
        staleness = stash.version - done.version
        if done.share:
            self._weights.step_part(done.share)
        stash.version += 1
        if place.delay:
            # Of the next forward pass: it uses the current version, or an older one.
            late = place.delay - place.ahead if place.vertical_sync else 0
            stash.end(done.version, oldest_needed=stash.version - late)
            if place.vertical_sync:
                stash.keep(stash.version)
        step = number // place.micro_batches
        self._rows += own_update(
            worker=place.stage, sequence=number, step=step, staleness=staleness
        )
