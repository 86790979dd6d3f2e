"""A training whose computation is mostly sleeping, for hosts that share the cores of a machine.

Each layer sleeps in proportion to its samples, twice as long in the backward pass as in the
forward pass. Gradients, messages and the optimiser are real, so communication overlaps the
backward pass as usual, and many hosts fit on few cores.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline

SEED, CLASSES = 1, 2
_PASSES = 3  # of a layer's sleep: one forward, two backward


class Options(paceline.TaskOptions):
    """width: inputs and outputs of each layer. sleep_s: of all layers, for each sample."""

    layers: int = 6
    width: int = 1024
    sleep_s: float = 0.02


class Sleeping(paceline.Task):
    """Linear layers, before each of which the training sleeps, and a classifier."""

    Options = Options

    def model(self) -> nn.Module:
        options: Options = self.options
        sleep_s = options.sleep_s / options.layers / _PASSES
        layers: list[nn.Module] = []
        for _ in range(options.layers):
            layers += [Delay(sleep_s), nn.Linear(options.width, options.width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(options.width, CLASSES))

    def dataset(self) -> Vectors:
        return Vectors(self.settings.samples, self.options.width)


class Delay(nn.Module):
    """A layer that returns its input after some time for each sample."""

    def __init__(self, sleep_s: float) -> None:
        super().__init__()
        self._sleep_s = sleep_s

    def forward(self, x: Tensor) -> Tensor:
        delayed: Tensor = _Sleep.apply(x, self._sleep_s)  # type: ignore[no-untyped-call]
        return delayed


class Vectors(Dataset[tuple[Tensor, int]]):
    """Random vectors of two classes, with different means."""

    def __init__(self, samples: int, width: int) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self._classes = torch.arange(samples) % CLASSES
        noise = torch.randn(samples, width, generator=generator)
        self._vectors = noise + (self._classes * 2 - 1)[:, None]

    def __len__(self) -> int:
        return len(self._classes)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._vectors[index], int(self._classes[index])


class _Sleep(torch.autograd.Function):
    """Return the input after `sleep_s` for each sample; the gradient after twice this time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sleep_s: float) -> Tensor:
        ctx.seconds = sleep_s * len(x)
        time.sleep(ctx.seconds)  # in place of computing
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)  # a backward pass computes twice as much
        return gradient, None
