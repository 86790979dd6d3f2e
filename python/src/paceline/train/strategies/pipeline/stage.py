"""Stages of a pipeline: the order of a stage's passes, and one stage that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from paceline.collectives.device_clock import Mark
from paceline.collectives.message_schedules import share_bounds
from paceline.collectives.recorder import PassCommunication, Total
from paceline.plan.trials.trial import Training
from paceline.train.strategies.pipeline.deferred import DeferredLinear, deferred
from paceline.train.strategies.pipeline.descriptor import PipelineSchedule
from paceline.train.strategies.pipeline.links import SplitPoint
from paceline.train.strategies.reduction.factor_exchange import NodeFactors
from paceline.train.training.batch_norm import placeholders, synchronise
from paceline.train.training.checkpointing import BlockBytes, Segments
from paceline.train.training.devices import CPU, InputMover, Stopwatch, synchronize
from paceline.train.training.dropout import set_sample_keys
from paceline.train.training.optimizers import trained_parameters
from paceline.train.training.passes import autocast, no_loss, summed_loss
from paceline.train.training.strategy import GradientResult, TrainBatch
from paceline.train.training.task import Task

if TYPE_CHECKING:
    from paceline.train.strategies.pipeline.partition import Layers


@dataclass(frozen=True, slots=True)
class Forward:
    """Forward pass of one micro-batch."""

    micro_batch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Backward pass of one micro-batch, some time after its forward pass."""

    micro_batch: int


Action = Forward | Backward


def actions(
    schedule: PipelineSchedule, stage: int, stages: int, micro_batches: int
) -> list[Action]:
    """Return the stage's actions of one step in order; micro-batches are in ascending order.

    `gpipe` runs all forward passes, then all backward passes, so a stage holds the activations of
    all m micro-batches. `1f1b` runs s - 1 - stage forward passes, then alternates one forward and
    one backward pass, so it holds those of s - stage micro-batches. Both have the same idle time.
    """
    ahead = micro_batches if schedule == "gpipe" else min(stages - 1 - stage, micro_batches)
    result: list[Action] = [Forward(i) for i in range(ahead)]
    for i in range(ahead, micro_batches):
        result += [Forward(i), Backward(i - ahead)]
    return result + [Backward(i) for i in range(micro_batches - ahead, micro_batches)]


def passes_in_flight(actions_of_stage: Sequence[Action]) -> int:
    """Return the largest number of micro-batches between their forward and backward passes."""
    signs = (1 if isinstance(action, Forward) else -1 for action in actions_of_stage)
    return max(accumulate(signs))


def stream_actions(
    ahead: int, micro_batches: int, step: int, *, drained_before: int = 0
) -> list[Action]:
    """Return a stage's actions of a step in a pipeline that is not drained between two steps.

    The order is that of `1f1b`. Micro-batches are counted over all steps; those that are in flight
    at the end of a step end in the next one, or in a drain (`drain_actions`).
    ahead: micro-batches whose forward passes precede the backward pass of an earlier one.
    drained_before: the first micro-batch since the last drain.
    """
    first = step * micro_batches
    result: list[Action] = []
    for i in range(first, first + micro_batches):
        result.append(Forward(i))
        if i - ahead >= drained_before:
            result.append(Backward(i - ahead))
    return result


def drain_actions(ahead: int, end: int, *, drained_before: int = 0) -> list[Action]:
    """Return a stage's backward passes of the micro-batches before `end` that are in flight; see
    `stream_actions`."""
    return [Backward(i) for i in range(max(drained_before, end - ahead), end)]


# --- one stage of one replica: runs its layers on the micro-batches of a step --------------------
#
# `StageLayers` is what a stage with flushes (`Stage`) and one without (pipedream.py) have in
# common.

Activity = Literal["forward", "backward", "bubble"]  # bubble: waiting for a neighbouring stage


class StageTimer:
    """Divide the time of a step among activities without gaps.

    A GPU's work ends after the call that submits it, so times are known in `result`.
    """

    def __init__(
        self, device: torch.device, communication: PassCommunication | None = None
    ) -> None:
        """communication: of the stage's layers, which no activity includes."""
        self._has_communication = communication is not None
        self._communication = communication or PassCommunication()
        self._communicated_s = self._communication.total_s
        self._stopwatch = Stopwatch(device)
        self._started_s = self._stopwatch.start()
        self._ends: list[tuple[Activity, Mark, float]] = []  # with all communication before

    def ended(self, doing: Activity) -> None:
        """Count the time since the last call as this activity."""
        self._ends.append((doing, self._stopwatch.mark(), self._communication.total_s))

    def result(self, loss_sum: float) -> GradientResult:
        """Return the activities of a step as times of a gradient that is not summed yet; waits for
        the device."""
        seconds: dict[Activity, float] = {"forward": 0.0, "backward": 0.0, "bubble": 0.0}
        last_s, last_communicated_s = self._started_s, self._communicated_s
        for doing, mark, communicated_s in self._ends:
            now_s = self._stopwatch.reached_s(mark)
            seconds[doing] += now_s - last_s - (communicated_s - last_communicated_s)
            last_s, last_communicated_s = now_s, communicated_s
        pass_comm_s = last_communicated_s - self._communicated_s
        return GradientResult(
            loss_sum=loss_sum,
            forward_s=seconds["forward"],
            backward_s=seconds["backward"],
            comm_s=None,
            comm_ready_unix_s=None,
            bubble_s=seconds["bubble"],
            pass_comm_s=pass_comm_s if self._has_communication else None,
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass of a micro-batch, for its backward pass."""

    received: Tensor | None  # a leaf tensor, whose gradient is sent back
    result: Tensor | None  # the output of the stage, or the loss; None without samples
    samples: int
    share: float = 0.0  # of the batch, if the weights change within a step
    version: int = 0  # of the weights then


class StageLayers:
    """Consecutive layers of a replica, between the split points `before` and `after`."""

    def __init__(
        self,
        task: Task,
        layers: Sequence[nn.Module],
        micro_batches: int,
        before: SplitPoint | None,
        after: SplitPoint | None,
        training: Training,
        device: torch.device = CPU,
    ) -> None:
        """micro_batches: of a step."""
        self._module = nn.Sequential(*layers)
        self._micro_batches = micro_batches
        self._before, self._after = before, after
        self._task, self._training = task, training
        self._device = device
        self._mover = InputMover(device)
        self._losses: list[Tensor] = []  # of the micro-batches of a step
        self._forward_of: Callable[[Tensor], Tensor] = self._module
        self._passes: dict[int, Pass] = {}  # in flight, by the number of the micro-batch

    def forward(self, number: int, batch: TrainBatch, timer: StageTimer) -> None:
        """Run the forward pass of a micro-batch of `batch`, between its neighbours."""
        slot = number % self._micro_batches
        low, high = share_bounds(len(batch.sample_ids), slot, self._micro_batches)
        if self._before is not None:
            timer.ended("forward")
            self._before.activations.wait(slot)
            timer.ended("bubble")
        done = self._passes[number] = self.compute(number, batch, low, high)
        if self._after is not None:
            if slot == 0:
                timer.ended("forward")
                self._after.activations.begin()
                timer.ended("bubble")
            output = done.result if done.samples else None
            self._after.activations.send(slot, None if output is None else output.detach())
        timer.ended("forward")

    def backward(self, number: int, timer: StageTimer) -> None:
        """Run the backward pass of a micro-batch, between its neighbours."""
        slot, done, gradient = number % self._micro_batches, self._passes.pop(number), None
        if self._after is not None:
            timer.ended("backward")
            self._after.gradients.wait(slot)
            timer.ended("bubble")
            gradient = self._after.gradients.received(slot, done.samples)
        if done.result is not None and done.result.requires_grad:
            is_scalar = done.result.dim() == 0  # a loss, or the zero of a placeholder
            self.differentiate(done, None if is_scalar else gradient)
        self.has_used_gradient(slot)
        if self._before is not None:
            if slot == 0:
                timer.ended("backward")
                self._before.gradients.begin()
                timer.ended("bubble")
            received = done.received
            self._before.gradients.send(slot, None if received is None else received.grad)

    def compute(self, number: int, batch: TrainBatch, low: int, high: int) -> Pass:
        """Run the layers on samples low to high of the replica's part, if there are any."""
        received = self.receive(number % self._micro_batches, high - low)
        if high == low:
            return Pass(None, None, 0)
        inputs = self._mover.move(batch.inputs[low:high]) if received is None else received
        return Pass(received, self._output(inputs, batch, low, high), high - low)

    def _taken_loss_sum(self) -> float:
        """Return the sum of losses of a step; a GPU would wait for it within the step."""
        losses, self._losses = self._losses, []
        return sum(map(float, losses))

    def receive(self, slot: int, samples: int) -> Tensor | None:
        """Return the activations that have arrived as a leaf tensor; None without any."""
        if self._before is None or not samples:
            return None
        return self._before.activations.received(slot, samples).requires_grad_()

    def differentiate(self, done: Pass, gradient: Tensor | None) -> None:
        """Compute the gradients of a pass. gradient: of its result; None for a scalar."""
        assert done.result is not None, "the caller has checked it"
        torch.autograd.backward(done.result, gradient)

    def has_used_gradient(self, slot: int) -> None:
        """Do what is possible now that a received gradient is not needed any longer."""

    def _output(self, inputs: Tensor, batch: TrainBatch, low: int, high: int) -> Tensor:
        """Return the outputs for samples low to high of the replica's part, or in the last stage
        their part of the mean loss of the batch."""
        training = self._training
        set_sample_keys(self._module, training.seed, batch.epoch, batch.sample_ids[low:high])
        with autocast(training, self._device.type):
            output = self._forward_of(inputs)
            if self._after is None:
                targets = self._mover.move(batch.targets[low:high])
                loss = summed_loss(self._task, output, targets)
                self._losses.append(loss.detach())
                output = loss / batch.global_samples
        return output


class Stage(StageLayers):
    """A stage that computes the gradient of a whole batch."""

    def __init__(
        self,
        task: Task,
        layers: Layers,
        actions: Sequence[Action],
        before: SplitPoint | None,
        after: SplitPoint | None,
        training: Training,
        device: torch.device = CPU,
    ) -> None:
        """actions: the actions of a step, two for each micro-batch."""
        modules = [deferred(layer) for _, layer in layers]
        super().__init__(task, modules, len(actions) // 2, before, after, training, device)
        self._names = [name for name, _ in layers]
        self._deferred = [m for m in self._module if isinstance(m, DeferredLinear)]
        later = {id(p) for layer in self._deferred for p in layer.parameters()}
        trained = trained_parameters(self._module).values()
        self._direct = [p for p in trained if id(p) not in later]
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            if not tensor.requires_grad:  # the others are in memory of the strategy
                tensor.data = tensor.data.to(device)
        self._actions = actions
        self._pass_communication: PassCommunication | None = None

    def checkpoint_activations(self, stored: Sequence[BlockBytes]) -> None:
        """Compute activations again in the backward passes. stored: bytes of each layer."""
        self._forward_of = Segments.of(
            stored, list(self._module), passes_in_flight=passes_in_flight(self._actions)
        )

    def gather_factors(self, nodes: NodeFactors) -> None:
        """Let layers of this stage compute their gradients from the factors of all nodes."""
        for name, layer in zip(self._names, self._module, strict=True):
            if name in nodes.layers and isinstance(layer, DeferredLinear):
                layer.gather_over(nodes, name)

    def synchronise(self, total: Total) -> None:
        """Sum the statistics of batch normalisation over the replicas of the stage, if global."""
        self._pass_communication = synchronise(self._module, total, self._training.batch_norm)

    def run(self, batch: TrainBatch) -> GradientResult:
        """Compute the gradient of the replica's loss into `.grad` of all parameters of the stage.

        The loss is the sum over the replica's samples, divided by `batch.global_samples`. `batch`
        is the replica's part of the batch; only the first stage reads its inputs.
        """
        timer = StageTimer(self._device, self._pass_communication)
        for parameter in self._direct:
            parameter.grad = None
        for layer in self._deferred:
            layer.begin()
        # Autocast caches cast weights until its outermost block ends. A disabled block around the
        # whole step keeps them for all micro-batches.
        with torch.autocast(self._device.type, enabled=False):
            for action in self._actions:
                if isinstance(action, Forward):
                    self.forward(action.micro_batch, batch, timer)
                else:
                    self.backward(action.micro_batch, timer)
                    timer.ended("backward")
        self._finish(timer)
        return timer.result(self._taken_loss_sum())

    def compute(self, number: int, batch: TrainBatch, low: int, high: int) -> Pass:
        if low == high and self._pass_communication is not None:
            return Pass(None, self._placeholder(batch), 0)
        return super().compute(number, batch, low, high)

    def _placeholder(self, batch: TrainBatch) -> Tensor:
        """Pass a sample that does not count, because other replicas sum statistics with this one.

        Return a zero whose backward pass gives zero gradients.
        """
        if self._before is None:
            inputs = self._mover.move(batch.inputs.new_zeros((1, *batch.inputs.shape[1:])))
        else:
            inputs = self._before.activations.placeholder()
        set_sample_keys(self._module, self._training.seed, batch.epoch, [0])
        with placeholders(self._module), autocast(self._training, self._device.type):
            output = self._forward_of(inputs)
        return no_loss(output)

    def _finish(self, timer: StageTimer) -> None:
        """Compute weight gradients over all micro-batches. Until then received tensors may be in
        use."""
        for layer in self._deferred:
            layer.send()
        for layer in self._deferred:
            layer.flush()
        for parameter in self._direct:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        synchronize(self._device)  # what has arrived in the slots is copied
        if self._before is not None:
            self._before.activations.release()
        if self._after is not None:
            self._after.gradients.release()
        timer.ended("backward")
