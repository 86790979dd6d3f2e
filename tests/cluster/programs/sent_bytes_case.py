"""Sizes and model of sent_bytes.py and its test; importing it does not initialise MPI."""

from __future__ import annotations

import torch
from torch import nn

ALL_GATHER = "all-gather ring"
ELEMENTS = 200_003  # float32, in several chunks
SAMPLES = 4  # of a rank
CLASSES = 10


def make_model() -> nn.Sequential:
    """Most weights are in a linear layer, which sends factors; the others are reduced."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 128, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(128 * 16, 512), nn.ReLU(), nn.Linear(512, CLASSES),
    )  # fmt: skip
