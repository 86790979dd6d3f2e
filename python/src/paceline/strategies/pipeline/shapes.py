"""Shapes and types of layer outputs, determined without computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

# Fake tensors propagate shape, type and device through the model's operators including autocast.
# Tensors on torch's meta device do not.
from paceline.training.fake_tensors import call_fake, fake_mode_of
from paceline.training.modes import evaluating
from paceline.training.precision import autocast

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.plan.trial import Training
    from paceline.strategies.pipeline.split_points import Layers
    from paceline.training.task import Task


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
    example = task.example_input()
    mode = fake_mode_of(layer for _, layer in layers)
    with mode, autocast(training), torch.no_grad():
        units = torch.zeros(example.shape, dtype=example.dtype)
        for _, layer in layers:
            with evaluating(layer):
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
