"""Make batches in tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paceline.training.strategy import TrainBatch


def train_batch(samples: int, **others: Any) -> TrainBatch:
    """Return a global batch of random images of 3 classes; others: fields with other values."""
    generator = torch.Generator().manual_seed(others.get("step", 0))
    usual = {
        "step": 0, "epoch": 0, "inputs": torch.randn(samples, 3, 32, 32, generator=generator),
        "targets": torch.arange(samples) % 3, "sample_ids": np.arange(samples),
        "global_samples": samples,
    }  # fmt: skip
    return TrainBatch(**{**usual, **others})
