"""The precision of a training."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from paceline.plan.trial import Training


def working_dtype(training: Training) -> torch.dtype:
    """Return the type in which large operations compute."""
    return torch.bfloat16 if training.precision == "bf16" else torch.float32


def autocast(training: Training, device: str = "cpu") -> AbstractContextManager[object]:
    """Return a context with lower precision on a device type, if the training requests it. It
    applies to the thread that enters it."""
    if training.precision == "bf16":
        return torch.autocast(device, dtype=torch.bfloat16)
    return nullcontext()
