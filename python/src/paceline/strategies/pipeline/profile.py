"""Measure how long each layer takes on this machine, to split a model into equally slow stages."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from paceline.strategies.pipeline.deferred import DeferredLinear, deferred
from paceline.strategies.pipeline.split_points import stage_bounds
from paceline.training.devices import CPU, synchronize
from paceline.training.dropout import set_sample_keys
from paceline.training.optimizers import TaskOptimizer, trained_parameters
from paceline.training.passes import autocast
from paceline.training.transforms import torch_memory_format
from paceline.workloads.facts import legal_split_points

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.plan.trial import Training
    from paceline.strategies.pipeline.split_points import Layers
    from paceline.training.task import Task

T = TypeVar("T")

# After one warm-up, the shortest of this many runs, or of those that fit in the budget (at least
# two). The minimum is used because other load on the machine can only make a run longer.
_RUNS = 8
_BUDGET_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of one layer and the in-place layers that follow it."""

    forward_s: float  # per micro-batch
    backward_s: float  # per micro-batch, without deferred work
    deferred_s: float  # per step: cast of the weights, weight gradients over all micro-batches
    step_s: float  # per optimiser step
    copy_s: float  # per micro-batch: copy of the output


@dataclass(frozen=True, slots=True)
class Profile:
    """Times of all layers with which a stage can begin, including the first layer."""

    indexes: list[int]
    times: list[LayerTimes]
    micro_batches: int
    replicas: int  # among which an optimiser step is divided

    def layer_costs_s(self, layers: int) -> list[float]:
        """Return seconds per step for each layer of the model."""
        costs = [0.0] * layers
        for index, t in zip(self.indexes, self.times, strict=True):
            micro_batch_s = t.forward_s + t.backward_s
            costs[index] = (
                self.micro_batches * micro_batch_s + t.deferred_s + t.step_s / self.replicas
            )
        return costs

    def crossing_costs_s(self, layers: int) -> list[float]:
        """Return seconds per step that a split point at each index adds to the stages on both
        sides: one copies its output, the other the gradient."""
        costs = [0.0] * layers
        for index, before in zip(self.indexes[1:], self.times, strict=False):
            costs[index] = self.micro_batches * before.copy_s
        return costs


def profile_layers(
    task: Task,
    layers: Layers,
    training: Training,
    *,
    samples: int,
    micro_batches: int,
    replicas: int,
    device: torch.device = CPU,
) -> Profile:
    """Time the layers on random inputs. `samples` is the size of one micro-batch.

    The weights keep their values but move to `device`; the gradients are discarded.
    """
    blocks = [
        _Block(task, layers[low:high], training, device)
        for low, high in stage_bounds(legal_split_points(layers), len(layers))
    ]
    inputs = _random_inputs(task.example_input(), samples, training).to(device)
    buffers = [(b, b.clone()) for block in blocks for b in block.module.buffers()]
    for block in blocks:
        set_sample_keys(block.module, training.seed, 0, range(samples))
    with torch.autocast(device.type, enabled=False):  # keeps cast weights, as in a step
        _run(blocks, inputs, micro_batches)
        for block in blocks:
            block.forget_times()
        started_s = time.perf_counter()
        for run in range(_RUNS):
            _run(blocks, inputs, micro_batches)
            if run > 0 and time.perf_counter() - started_s > _BUDGET_S:
                break
    for buffer, before in buffers:  # running statistics
        buffer.copy_(before)
    return Profile(
        [0, *legal_split_points(layers)],
        [block.times() for block in blocks],
        micro_batches,
        replicas,
    )


def _random_inputs(example: Tensor, samples: int, training: Training) -> Tensor:
    """Return inputs like the example: random numbers, or copies of the example for integers."""
    if not example.is_floating_point():
        return example.expand(samples, *example.shape[1:])
    generator = torch.Generator().manual_seed(training.seed)
    inputs = torch.randn((samples, *example.shape[1:]), generator=generator)
    if inputs.dim() != 4:
        return inputs
    return inputs.to(memory_format=torch_memory_format(training.memory_format))


def _run(blocks: list[_Block], inputs: Tensor, micro_batches: int) -> None:
    units = inputs
    for number, block in enumerate(blocks):
        units = block.forward(units, first=number == 0)
    gradient = torch.ones_like(units)
    for block in reversed(blocks):
        gradient = block.backward(gradient, micro_batches)


class _Block:
    """Layers between two possible split points, and their times."""

    def __init__(
        self, task: Task, layers: Layers, training: Training, device: torch.device
    ) -> None:
        self._task = task
        self.module = nn.Sequential(*(deferred(layer) for _, layer in layers)).to(device)
        self._device = device
        # At most one, because a stage can begin with any linear layer.
        self._deferred = next((m for m in self.module if isinstance(m, DeferredLinear)), None)
        self._training = training
        self._inputs = self._outputs = torch.empty(0)
        self._seconds: dict[str, list[float]] = {}

    def forward(self, inputs: Tensor, *, first: bool) -> Tensor:
        self._inputs = inputs.detach()
        self._inputs.requires_grad_(not first)
        with autocast(self._training, self._device.type):
            if self._deferred is not None:
                self._timed("cast_s", partial(self._deferred.cast, self._device.type))
            self._outputs = self._timed("forward_s", lambda: self.module(self._inputs))
        outputs = self._outputs.detach()
        copy = torch.empty_like(outputs)
        self._timed("copy_s", lambda: copy.copy_(outputs))
        return copy

    def backward(self, gradient: Tensor, micro_batches: int) -> Tensor:
        """Return the gradient of the inputs; empty for the first block."""
        if self._outputs.requires_grad:
            self._timed("backward_s", lambda: torch.autograd.backward(self._outputs, gradient))
        result = torch.empty(0) if self._inputs.grad is None else self._inputs.grad
        self._flush(micro_batches)
        self._step()
        self._inputs = self._outputs = torch.empty(0)
        self.module.zero_grad()
        return result

    def times(self) -> LayerTimes:
        shortest = {name: min(times) for name, times in self._seconds.items()}
        return LayerTimes(
            forward_s=shortest["forward_s"],
            backward_s=shortest.get("backward_s", 0.0),
            deferred_s=shortest.get("cast_s", 0.0) + shortest.get("flush_s", 0.0),
            step_s=shortest.get("step_s", 0.0),
            copy_s=shortest["copy_s"],
        )

    def forget_times(self) -> None:
        self._seconds.clear()

    def _flush(self, micro_batches: int) -> None:
        if self._deferred is not None:
            self._deferred.repeat(micro_batches)
            self._timed("flush_s", self._deferred.flush)

    def _step(self) -> None:
        """Time an optimiser step on other memory of the same size; the first one creates its
        state."""
        if "step_s" in self._seconds:  # once is enough for a small part of the step
            return
        trained = trained_parameters(self.module)
        copies = [(n, nn.Parameter(torch.zeros_like(p))) for n, p in trained.items()]
        if not copies:
            return
        for _, copy in copies:
            copy.grad = torch.zeros_like(copy)
        optimizer = TaskOptimizer(self._task, copies)
        optimizer.step()
        self._timed("step_s", optimizer.step)

    def _timed(self, name: str, action: Callable[[], T]) -> T:
        started_s = time.perf_counter()
        result = action()
        synchronize(self._device)
        self._seconds.setdefault(name, []).append(time.perf_counter() - started_s)
        return result
