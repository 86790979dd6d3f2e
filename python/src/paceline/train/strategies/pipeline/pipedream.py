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

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.base.errors import UsageError
from paceline.measure.records.communication import StrategyResult
from paceline.measure.records.rows import UpdateRow, own_update
from paceline.plan.trials.trial import RankContext, Training, Trial
from paceline.train.strategies.pipeline.descriptor import PipelineOptions
from paceline.train.strategies.pipeline.links import SplitPoint, StageWeights
from paceline.train.strategies.pipeline.partition import GridPosition, Layers, settings_of
from paceline.train.strategies.pipeline.stage import (
    Forward,
    Pass,
    StageLayers,
    StageTimer,
    drain_actions,
    stream_actions,
)
from paceline.train.strategies.pipeline.strategy import PipelineStrategy
from paceline.train.training.devices import CPU
from paceline.train.training.state import SavedState
from paceline.train.training.strategy import GradientResult, RankGroups, TrainBatch
from paceline.train.training.task import Task


class WeightStash:
    """Copies of a stage's weights for micro-batches in flight.

    A copy is necessary: autograd keeps views of the weights, which must not change until the
    backward pass.
    """

    def __init__(self, weights: StageWeights) -> None:
        self._weights = weights
        self._copies: dict[int, Tensor] = {}
        self._in_flight: Counter[int] = Counter()
        self._free: list[Tensor] = []
        self.version = 0  # number of updates
        self.most_copies = 0

    def begin(self, version: int) -> None:
        """Use these weights for a forward pass; they are kept until `end`."""
        self._in_flight[version] += 1
        self.keep(version)
        self.use(version)

    def keep(self, version: int) -> None:
        """Copy the current weights, unless this version was copied before."""
        if version in self._copies:
            return
        assert version == self.version, "an older version was kept while it was the current one"
        current = self._weights.flat  # changed by updates in place
        copy = self._free.pop() if self._free else torch.empty_like(current)
        self._copies[version] = copy.copy_(current)
        self.most_copies = max(self.most_copies, len(self._copies))

    def use(self, version: int) -> None:
        """Let the stage's parameters be views of a version that is kept."""
        self._weights.bind(self._copies[version])

    def use_current(self) -> None:
        """Let the stage's parameters be the current weights; updates change them."""
        self._weights.bind(self._weights.flat)

    def end(self, version: int, oldest_needed: int) -> None:
        """Release a version after its backward pass, and all others before `oldest_needed`."""
        self._in_flight[version] -= 1
        for each in [v for v in self._copies if v < oldest_needed and not self._in_flight[v]]:
            self._free.append(self._copies.pop(each))


class StreamStage(StageLayers):
    """A stage that updates its weights with the gradient of each micro-batch."""

    def __init__(
        self,
        task: Task,
        layers: Layers,
        place: GridPosition,
        settings: PipelineOptions,
        before: SplitPoint | None,
        after: SplitPoint | None,
        training: Training,
    ) -> None:
        modules = [layer for _, layer in layers]
        super().__init__(task, modules, settings.micro_batches, before, after, training)
        self._stage = place.stage
        self._vertical_sync = settings.vertical_sync
        # Micro-batches whose forward passes precede the backward pass of an earlier one.
        self._ahead = place.stages - 1 - place.stage
        # Updates between the forward pass of a micro-batch and its own update.
        self._delay = place.stages - 1 if settings.vertical_sync else self._ahead
        self._weights: StageWeights
        self.stash: WeightStash
        self._drained_before = 0  # the first micro-batch since the last drain
        self._rows: list[UpdateRow] = []

    def update(self, weights: StageWeights) -> None:
        """Update these weights, which are those of the layers, from now on."""
        self._weights, self.stash = weights, WeightStash(weights)

    def run(self, batch: TrainBatch) -> GradientResult:
        """Start all micro-batches of a batch, and finish those that are due; after the last batch,
        all of them."""
        timer = StageTimer(CPU)
        for action in stream_actions(
            self._ahead, self._micro_batches, batch.step, drained_before=self._drained_before
        ):
            if isinstance(action, Forward):
                self.forward(action.micro_batch, batch, timer)
            else:
                self.backward(action.micro_batch, timer)
        if batch.is_last:
            self.drain(batch.step + 1, timer)
        self.stash.use_current()
        timer.ended("backward")
        return timer.result(self._taken_loss_sum())

    def begin_after(self, steps: int) -> None:
        """Begin as after a drain, with the weights after so many steps."""
        self._drained_before = self.stash.version = steps * self._micro_batches

    def drain(self, steps: int, timer: StageTimer) -> None:
        """Finish all micro-batches of the steps so far."""
        end = steps * self._micro_batches
        for action in drain_actions(self._ahead, end, drained_before=self._drained_before):
            self.backward(action.micro_batch, timer)
        self._drained_before = end
        self.stash.use_current()

    def take_rows(self) -> list[UpdateRow]:
        """Return the rows of the updates since the last call."""
        rows, self._rows = self._rows, []
        return rows

    def compute(self, number: int, batch: TrainBatch, low: int, high: int) -> Pass:
        version = self.stash.version
        if self._vertical_sync:
            version = max(self._drained_before, number - self._delay)
        if self._delay:
            self.stash.begin(version)
        share = (high - low) / batch.global_samples
        return replace(super().compute(number, batch, low, high), share=share, version=version)

    def receive(self, slot: int, samples: int) -> Tensor | None:
        """Return a copy, because the slot is filled again before the backward pass."""
        received = super().receive(slot, samples)
        if received is not None:
            received = received.detach().clone().requires_grad_()
        if self._before is not None and slot == self._micro_batches - 1:
            self._before.activations.release()
        return received

    def differentiate(self, done: Pass, gradient: Tensor | None) -> None:
        if self._delay:
            self.stash.use(done.version)
        self._module.zero_grad()
        super().differentiate(done, gradient)

    def has_used_gradient(self, slot: int) -> None:
        if self._after is not None and slot == self._micro_batches - 1:
            self._after.gradients.release()

    def backward(self, number: int, timer: StageTimer) -> None:
        done = self._passes[number]
        super().backward(number, timer)
        self._apply(number, done)
        timer.ended("backward")

    def _apply(self, number: int, done: Pass) -> None:
        """Update the weights with the gradients of a micro-batch."""
        stash = self.stash
        staleness = stash.version - done.version
        if done.share:
            self._weights.step_part(done.share)
        stash.version += 1
        if self._delay:
            # Of the next forward pass: it uses the current version, or an older one.
            late = self._delay - self._ahead if self._vertical_sync else 0
            stash.end(done.version, oldest_needed=stash.version - late)
            if self._vertical_sync:
                stash.keep(stash.version)
        step = number // self._micro_batches
        self._rows += own_update(
            worker=self._stage, sequence=number, step=step, staleness=staleness
        )


class PipeDreamStrategy(PipelineStrategy):
    """One stage, which updates its weights within `gradient`."""

    pauses_for_checkpoints = True

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0  # whose passes have begun

    def prepare(
        self, task: Task, model: nn.Module, context: RankContext, trial: Trial, peers: RankGroups
    ) -> None:
        """Raises UsageError, beside what a pipeline raises, if stages that were balanced by
        measured times share a parameter."""
        super().prepare(task, model, context, trial, peers)
        if self._has_ties:
            raise UsageError(
                'schedule: with "pipedream" a parameter belongs to one stage, but stages share '
                'one; use "1f1b", or other split_points'
            )
        self._stream.update(self._weights)

    def gradient(self, batch: TrainBatch) -> GradientResult:
        """Run the passes of the step; the weights change after each micro-batch.

        The time of the updates is a part of backward_s.
        """
        result = self._stream.run(batch)
        self._steps = batch.step + 1
        return result

    def step(self) -> None:
        """Do nothing: `gradient` has updated the weights."""

    def gradients(self) -> dict[str, Tensor]:
        """Return none: there is no gradient of a whole batch."""
        return {}

    def updates(self) -> list[UpdateRow]:
        return self._stream.take_rows()

    def settle(self) -> None:
        """Finish the micro-batches in flight. The next step begins as the first one does."""
        self._stream.drain(self._steps, StageTimer(CPU))

    def restore(self, saved: SavedState) -> None:
        self._steps = saved.steps
        self._stream.begin_after(saved.steps)
        super().restore(saved)

    def describe(self) -> StrategyResult:
        """Return the settings; stashed weights are those of this rank's stage."""
        copies = self._stream.stash.most_copies
        return {
            **super().describe(),
            "stashed_versions": copies,
            "stashed_bytes": copies * 4 * self._weights.elements,
        }

    def _open_stage(
        self,
        layers: Layers,
        place: GridPosition,
        before: SplitPoint | None,
        after: SplitPoint | None,
        trial: Trial,
        device: torch.device,  # noqa: ARG002  (planning admits the CPU only)
    ) -> None:
        settings, training = settings_of(trial), trial.training
        self._stream = StreamStage(self._task, layers, place, settings, before, after, training)
