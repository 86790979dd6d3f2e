"""The task of checkpoint_interval.py: short steps, and a state that takes a while to write."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import nn

import paceline

INPUTS, WIDTH, CLASSES = 64, 1536, 4


class Numbers:
    """Random numbers with labels."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], int]:
        generator = np.random.default_rng(index)
        return generator.standard_normal(INPUTS, dtype=np.float32), index % CLASSES


class Wide(paceline.Task):
    """Four linear layers; with momentum the state of the training has 39 MB."""

    def dataset(self) -> Numbers:
        return Numbers()

    def model(self) -> nn.Module:
        wide = [nn.Linear(INPUTS, WIDTH), nn.ReLU()]
        wide += [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        return nn.Sequential(*wide, nn.Linear(WIDTH, CLASSES))
