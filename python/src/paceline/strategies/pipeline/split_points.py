"""The best split points of a model, and the activations that cross them.

A split point is the index of the first layer of a stage, in the order of `Task.blocks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import nn

from paceline.training.fake_tensors import call_fake, fake_mode
from paceline.training.passes import autocast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.plan.trial import Training
    from paceline.training.task import Task

Layers = list[tuple[str, nn.Module]]


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


def trace(task: Task, layers: Layers, training: Training) -> list[Activation]:
    """Return the output of each layer per sample, in the precision and memory format of
    `training`."""
    channels_last = training.memory_format == "channels_last"
    result = []
    # Fake tensors propagate shape, type and device through the model's operators including
    # autocast. Tensors on torch's meta device do not.
    mode, units = fake_mode(), task.example_input()
    with autocast(training):
        for _, layer in layers:
            units = call_fake(mode, layer, units)
            shape = tuple(units.shape[1:])
            result.append(Activation(shape, units.dtype, channels_last and len(shape) == 3))
    return result


def layer_bytes(layers: Layers, activations: list[Activation], samples: int) -> list[int]:
    """Return the bytes of each layer: its parameters and its output for `samples` samples.

    An in-place layer needs no memory for its output.
    """
    return [
        sum(p.numel() * p.element_size() for p in layer.parameters())
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
