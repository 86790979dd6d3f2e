"""The task of small_records.py: a small network on lists of numbers."""

from __future__ import annotations

from torch import nn

import paceline


class Classify(paceline.Task):
    """Predict the label from the numbers."""

    input_field = "numbers"

    def model(self) -> nn.Module:
        """Return a network with one hidden layer."""
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
