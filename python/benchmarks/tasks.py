"""Tasks of the benchmarks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import paceline
from paceline.train.training.task import NamedParameters
from paceline.train.workloads.gpt import GPT

CLASSES = 3
_CHANNELS = (3, 64, 128, 256, 512, 256)


class RandomSamples:
    """Random numbers of a shape with labels; equal on every host."""

    def __init__(self, count: int, shape: tuple[int, ...], classes: int) -> None:
        self._count, self._shape, self._classes = count, shape, classes

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], int]:
        generator = np.random.default_rng(index)
        return generator.standard_normal(self._shape, dtype=np.float32), index % self._classes


class Convolutional(paceline.Task):
    """Five convolutions, the mean over the image, and a linear layer; 2.7 million parameters.

    Of lab.py: factors of the one small linear layer gain nothing, so `auto` and `never` must be
    equally fast.
    """

    def dataset(self) -> RandomSamples:
        return RandomSamples(256, (3, 112, 112), CLASSES)

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for index, (ins, outs) in enumerate(pairwise(_CHANNELS)):
            stride = 1 if index == 0 else 2
            layers += [nn.Conv2d(ins, outs, 3, stride=stride, padding=1), nn.ReLU(inplace=True)]
        head = nn.Linear(_CHANNELS[-1], CLASSES)
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


class Balanced(Convolutional):
    """Four convolutions and a large linear layer, whose factors are a thirtieth of its gradient.

    Of turns.py: 4.6 million parameters, half a second to a second a step of 32 images on one core.
    """

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for index, (ins, outs) in enumerate(pairwise((3, 32, 64, 128, 256))):
            stride = 1 if index == 0 else 2
            layers += [nn.Conv2d(ins, outs, 3, stride=stride, padding=1), nn.ReLU(inplace=True)]
        layers += [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(1024, CLASSES))


class Classify(paceline.Task):
    """Predict the label from the numbers, with one hidden layer. Of small_records.py."""

    input_field = "numbers"

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


class AdaptiveGPT(GPT):
    """The workload `gpt-small` with AdamW, whose state is twice as large as the weights.

    Of zero.toml.
    """

    def optimizer(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.settings.learning_rate)
