"""Partition of a trial's model into stages, equal on all ranks.

A split point is the index of the first layer of a stage, in the order of `Task.blocks`. With
balance "time", rank 0 measures how long each layer takes on this machine, and the best split points
follow.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Self, TypeVar

import torch
from torch import Tensor, nn

from paceline.base.errors import UsageError
from paceline.collectives.node.memory import NodeShare
from paceline.measure.records.communication import StrategyResult
from paceline.plan.trials.trial import RankContext, Training, Trial
from paceline.train.strategies.pipeline.deferred import DeferredLinear, deferred
from paceline.train.strategies.pipeline.descriptor import PipelineOptions, model_faults
from paceline.train.training.devices import CPU, lent_to, synchronize
from paceline.train.training.dropout import set_sample_keys
from paceline.train.training.optimizers import TaskOptimizer, trained_parameters
from paceline.train.training.passes import autocast
from paceline.train.training.task import Task, torch_memory_format
from paceline.train.training.tensors import call_fake, fake_mode
from paceline.train.workloads.facts import legal_split_points

Layers = list[tuple[str, nn.Module]]
T = TypeVar("T")

# After one warm-up, the shortest of this many runs, or of those that fit in the budget (at least
# two). The minimum is used because other load on the machine can only make a run longer.
_RUNS = 8
_BUDGET_S = 15.0


@dataclass(frozen=True, slots=True)
class Activation:
    """The output of a layer for one sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool

    @property
    def bytes_per_sample(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, memory: Tensor, samples: int) -> Tensor:
        """Return `samples` samples at the beginning of `memory` (uint8, aligned), without a
        copy."""
        flat = memory[: samples * self.bytes_per_sample].view(self.dtype)
        if not self.channels_last:
            return flat.view(samples, *self.shape)
        channels, height, width = self.shape
        return flat.view(samples, height, width, channels).permute(0, 3, 1, 2)


def trace(
    task: Task, layers: Layers, training: Training, device: torch.device = CPU
) -> list[Activation]:
    """Return the output of each layer per sample on a device, in the precision and memory format of
    `training`.

    A layer can have outputs of another type on a GPU: autocast has rules for each kind of device.
    """
    channels_last = training.memory_format == "channels_last"
    result = []
    # Fake tensors propagate shape, type and device through the model's operators including
    # autocast. Tensors on torch's meta device do not.
    mode, units = fake_mode(), task.example_input()
    with autocast(training, device.type):
        for _, layer in layers:
            units = call_fake(mode, layer, units, device)
            shape = tuple(units.shape[1:])
            result.append(Activation(shape, units.dtype, channels_last and len(shape) == 3))
    return result


def layer_bytes(layers: Layers, activations: list[Activation], samples: int) -> list[int]:
    """Return the bytes of each layer: its parameters and its output for `samples` samples.

    An in-place layer needs no memory for its output.
    """
    return [
        sum(p.nbytes for p in layer.parameters())
        + (0 if getattr(layer, "inplace", False) else samples * activation.bytes_per_sample)
        for (_, layer), activation in zip(layers, activations, strict=True)
    ]


def balanced_split_points(
    layer_costs: Sequence[float],
    stages: int,
    legal: Sequence[int],
    crossing_costs: Sequence[float] | None = None,
) -> list[int]:
    """Choose `stages` - 1 of the `legal` split points so that the slowest stage is fastest.

    layer_costs: cost of each layer, >= 0, in any unit. crossing_costs: cost of a split point at
    each index for the stage on either side; None means no cost. The result is exact, by dynamic
    programming over (number of stages, end). Ties are resolved in favour of cheap early stages,
    then of early split points. `legal` must have at least `stages` - 1 entries.
    """
    layers = len(layer_costs)
    crossing = [0.0] * (layers + 1) if crossing_costs is None else [*crossing_costs, 0.0]
    before = [0.0, *accumulate(layer_costs)]
    places = [*legal, layers]

    def cost(low: int, high: int) -> float:
        received = crossing[low] if low > 0 else 0.0
        sent = crossing[high] if high < layers else 0.0
        return before[high] - before[low] + received + sent

    # best[end]: (cost of the slowest stage, split points) of layers[:end] in the stages so far
    best: dict[int, tuple[float, list[int]]] = {end: (cost(0, end), []) for end in places}
    for stage in range(1, stages):
        best = {
            end: min(
                (max(slowest, cost(low, end)), [*split_points, low])
                for low, (slowest, split_points) in best.items()
                if low < end
            )
            for end in places[stage:]
        }
    return best[layers][1]


def stage_bounds(split_points: Sequence[int], layers: int) -> list[tuple[int, int]]:
    """Return (first layer, one past the last) of each stage."""
    return list(zip([0, *split_points], [*split_points, layers], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of one layer and the in-place layers that follow it."""

    forward_s: float  # per micro-batch
    backward_s: float  # per micro-batch, without deferred work
    deferred_s: float  # per step: cast of the weights, weight gradients over all micro-batches
    step_s: float  # per optimiser step
    copy_s: float  # per micro-batch: copy of the output


@dataclass(frozen=True, slots=True)
class LayerProfile:
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
) -> LayerProfile:
    """Time the layers on random inputs. `samples` is the size of one micro-batch.

    The weights keep their values; the gradients are discarded. A GPU has the tensors of one block
    at a time, because all of them may need more memory than it has.
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
        _run(blocks, inputs, micro_batches, device)
        for block in blocks:
            block.seconds.clear()
        started_s = time.perf_counter()
        for run in range(_RUNS):
            _run(blocks, inputs, micro_batches, device)
            if run > 0 and time.perf_counter() - started_s > _BUDGET_S:
                break
    for buffer, before in buffers:  # running statistics
        buffer.copy_(before)
    return LayerProfile(
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


def _run(blocks: list[_Block], inputs: Tensor, micro_batches: int, device: torch.device) -> None:
    units = inputs
    if device != CPU:
        for number, block in enumerate(blocks):
            with block.on_device():
                units = block.forward(units, first=number == 0)
                block.backward(torch.ones_like(units), micro_batches)
        return
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
        self.module = nn.Sequential(*(deferred(layer) for _, layer in layers))
        self._device = device
        # At most one, because a stage can begin with any linear layer.
        self._deferred = next((m for m in self.module if isinstance(m, DeferredLinear)), None)
        self._training = training
        self._inputs = self._outputs = torch.empty(0)
        self.seconds: dict[str, list[float]] = {}

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
        if self._deferred is not None:
            self._deferred.repeat(micro_batches)
            self._timed("flush_s", self._deferred.flush)
        self._step()
        self._inputs = self._outputs = torch.empty(0)
        self.module.zero_grad()
        return result

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the tensors of this block on the device meanwhile."""
        with lent_to(self._device, self.module):
            yield
        if self._deferred is not None:
            self._deferred.free_gradients()

    def times(self) -> LayerTimes:
        shortest = {name: min(times) for name, times in self.seconds.items()}
        return LayerTimes(
            forward_s=shortest["forward_s"],
            backward_s=shortest.get("backward_s", 0.0),
            deferred_s=shortest.get("cast_s", 0.0) + shortest.get("flush_s", 0.0),
            step_s=shortest.get("step_s", 0.0),
            copy_s=shortest["copy_s"],
        )

    def _step(self) -> None:
        """Time an optimiser step on other memory of the same size; the first one creates its
        state."""
        if "step_s" in self.seconds:  # once is enough for a small part of the step
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
        self.seconds.setdefault(name, []).append(time.perf_counter() - started_s)
        return result


@dataclass(frozen=True, slots=True)
class GridPosition:
    """Position of a worker on its node."""

    replica: int
    stage: int
    replicas: int
    stages: int

    @classmethod
    def of(cls, context: RankContext, stages: int) -> Self:
        replica, stage = divmod(context.local_rank, stages)
        return cls(replica, stage, context.ranks_on_node // stages, stages)

    def local_rank(self, replica: int, stage: int) -> int:
        return replica * self.stages + stage

    def siblings(self, stage: int) -> list[int]:
        """Return the local ranks of this stage in all replicas."""
        return [self.local_rank(replica, stage) for replica in range(self.replicas)]


@dataclass(frozen=True, slots=True)
class Partition:
    """Split points of a model, and the activations that cross them."""

    split_points: list[int]
    crossing: list[Activation]  # by split point

    def describe(self, layers: Layers, trial: Trial) -> StrategyResult:
        """Return the partition for the records; bytes are per step and replica."""
        samples = trial.placement.samples_of_a_replica(trial.training.global_batch)
        crossing_bytes = [samples * activation.bytes_per_sample for activation in self.crossing]
        return {
            "split_points": self.split_points,
            "first_layers": [layers[index][0] for index in self.split_points],
            "bytes_forward": crossing_bytes,
            "bytes_backward": crossing_bytes,
        }


def settings_of(trial: Trial) -> PipelineOptions:
    return trial.options_as(PipelineOptions)


def micro_batch_samples(trial: Trial) -> int:
    """Return the maximum number of samples of a micro-batch."""
    replica = trial.placement.samples_of_a_replica(trial.training.global_batch)
    return -(-replica // settings_of(trial).micro_batches)


def partition_model(
    task: Task,
    layers: Layers,
    trial: Trial,
    world: NodeShare,
    device: torch.device = CPU,
) -> Partition:
    """Split `layers` as `trial` requests. With balance "time" it is collective: rank 0 measures
    while the others wait, at most `limits.trial_s`.

    Raises UsageError if the model cannot be split so, TimedOut if rank 0 does not answer.
    """
    settings, stages = settings_of(trial), trial.placement.stages
    activations = trace(task, layers, trial.training, device)
    places = legal_split_points(layers)
    faults = list(model_faults(trial.training.model, places, stages, settings.split_points))
    if faults:
        raise UsageError("; ".join(faults))
    if settings.split_points is not None:
        split_points = list(settings.split_points)
    elif settings.balance == "size":
        costs = layer_bytes(layers, activations, micro_batch_samples(trial))
        split_points = balanced_split_points(costs, stages, places)
    else:
        split_points = _by_time(task, layers, trial, world, device)
    return Partition(split_points, [activations[index - 1] for index in split_points])


def _by_time(
    task: Task, layers: Layers, trial: Trial, world: NodeShare, device: torch.device
) -> list[int]:
    if world.local_rank != 0:
        found: list[int] = json.loads(world.lookup("split_points", trial.limits.trial_s))
        return found
    settings = settings_of(trial)
    profile = profile_layers(
        task,
        layers,
        trial.training,
        samples=micro_batch_samples(trial),
        micro_batches=settings.micro_batches,
        replicas=trial.placement.replicas_per_node,
        device=device,
    )
    split_points = balanced_split_points(
        profile.layer_costs_s(len(layers)),
        trial.placement.stages,
        legal_split_points(layers),
        profile.crossing_costs_s(len(layers)),
    )
    world.publish("split_points", json.dumps(split_points))
    return split_points
