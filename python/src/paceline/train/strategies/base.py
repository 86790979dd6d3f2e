"""What a local strategy must do.

A strategy owns the replica or replicas of a rank. It turns the rank's share of a global batch into
the gradient of the mean loss over the whole global batch, left in `.grad` of `parameters()`, equal
on all ranks; the loop then steps the optimiser. It does not know which launcher started it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from paceline.plan.trial import Trial
    from paceline.train.context import RankContext


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """A rank's share of a global batch; it may be empty (n = 0)."""

    step: int
    epoch: int
    images: Tensor  # shape (n, 3, S, S), float32, normalised
    labels: Tensor  # shape (n,), int64
    sample_ids: NDArray[np.int64]  # shape (n,)
    global_samples: int  # of the whole batch, all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientResult:
    """What the gradient of one step cost; backward_s + comm_s is the whole backward call."""

    loss_sum: float  # over the rank's own samples
    forward_s: float
    backward_s: float  # until this rank's last gradient was ready
    comm_s: float | None  # from then until all are averaged; None without peers
    comm_ready_unix_s: float | None  # when this rank's last gradient was ready


class LocalStrategy(Protocol):
    """How one rank uses what it was given."""

    def prepare(self, model: nn.Module, context: RankContext, trial: Trial) -> None:
        """Take the model (in its memory format); the process group of several ranks is open."""

    def gradient(self, batch: TrainBatch) -> GradientResult:
        """Compute and average; collective over all ranks, also for an empty share."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """What the optimiser steps, by the model's own names, in the model's order."""

    def state_dict(self) -> dict[str, Tensor]:
        """The weights by the model's own names."""

    def describe(self) -> dict[str, Any]:
        """What a reader of the results should know (bucket sizes)."""
