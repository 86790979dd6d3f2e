"""What a local strategy must do.

A strategy owns the workers of a rank: replicas of the model, or stages of one. It turns the rank's
share of a global batch into the gradient of the mean loss over the whole global batch, equal for
all replicas, and takes the optimiser's step with it. It does not know which launcher started it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from paceline.data.node import NodeShare
    from paceline.plan.trial import Trial
    from paceline.records.rows import WorkerEnvironment
    from paceline.training.context import RankContext


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """A rank's share of a global batch; it may be empty (n = 0)."""

    step: int
    epoch: int
    images: Tensor  # shape (n, 3, S, S), float32, normalised; no pixels but in the first stage
    labels: Tensor  # shape (n,), int64
    sample_ids: NDArray[np.int64]  # shape (n,)
    global_samples: int  # of the whole batch, all ranks
    is_last: bool = False  # of the training


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientResult:
    """What the gradient of one step cost; the four times add up to the whole call."""

    loss_sum: float  # over the rank's own samples; 0 in all stages of a pipeline but the last
    forward_s: float
    backward_s: float  # until this rank's last gradient was ready
    comm_s: float | None  # from then until all are averaged; None without peers
    comm_ready_unix_s: float | None  # when this rank's last gradient was ready
    bubble_s: float | None = None  # waiting for neighbouring stages; None without a pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightAveraging:
    """What it cost to average weights, after the optimiser's own step."""

    comm_s: float
    comm_ready_unix_s: float  # when this rank's weights were ready


class RankGroups(Protocol):
    """Who else there is, as a strategy sees it."""

    def node(self, purpose: str) -> NodeShare | None:
        """The ranks of this node, for one purpose; None for a single rank."""

    def world(self, purpose: str) -> NodeShare | None:
        """All ranks, as if on one node; None for a single rank."""


class LocalStrategy(Protocol):
    """How one rank uses what it was given."""

    def prepare(
        self, model: nn.Module, context: RankContext, trial: Trial, peers: RankGroups
    ) -> None:
        """Take the model (in its memory format); collective. The process group, if any, is open."""

    def to_input(self, pixels: NDArray[np.uint8]) -> Tensor:
        """A batch's photos, shape (n, S, S, 3), as `TrainBatch.images`."""

    def gradient(self, batch: TrainBatch) -> GradientResult:
        """Compute and average; collective over all ranks, also for an empty share."""

    def step(self) -> WeightAveraging | None:
        """Step the optimiser; collective.

        Of a strategy that then averages weights: what that cost, if it did.
        """

    def gradients(self) -> dict[str, Tensor]:
        """The averaged gradients by the model's own names, between `gradient` and `step`.

        Collective over the node; of the whole model on the first rank, elsewhere maybe of less.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """The weights of the whole model by its own names, on every rank; collective."""

    def workers(self) -> list[WorkerEnvironment]:
        """What the threads that train replicas of their own really have; [] if there are none."""

    def describe(self) -> dict[str, Any]:
        """What a reader of the results should know (bucket sizes, split points)."""

    def close(self, *, failed: bool) -> None:
        """End threads and free what is shared; harmless when called again.

        Waits for no peer. With `failed`, peers that wait for this rank are told.
        """
