"""A network whose weights are in convolutions: factors of its one small linear layer gain nothing.

lab.py trains it with `auto` and `never`, which must be equally fast.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import nn

import paceline

CLASSES = 3
_CHANNELS = (3, 64, 128, 256, 512, 256)


class Images:
    """Random images of 112 x 112 pixels with labels; equal on every host."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], int]:
        generator = np.random.default_rng(index)
        return generator.standard_normal((3, 112, 112), dtype=np.float32), index % CLASSES


class Convolutional(paceline.Task):
    """Five convolutions, the mean over the image, and a linear layer; 2.7 million parameters."""

    def dataset(self) -> Images:
        return Images()

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for index, (ins, outs) in enumerate(pairwise(_CHANNELS)):
            stride = 1 if index == 0 else 2
            layers += [nn.Conv2d(ins, outs, 3, stride=stride, padding=1), nn.ReLU(inplace=True)]
        head = nn.Linear(_CHANNELS[-1], CLASSES)
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
