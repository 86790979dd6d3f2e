"""Interface of a local strategy.

A strategy owns the workers of a rank: replicas of the model, or stages of one. It computes the
gradient of the mean loss over the whole global batch from the rank's part of the batch, equal for
all replicas, and steps the optimiser with it. It does not know the launcher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from paceline.base.errors import UsageError
from paceline.collectives.node.memory import NodeShare
from paceline.plan.trials.trial import RankContext

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from paceline.measure.records.communication import StrategyResult
    from paceline.measure.records.rows import UpdateRow, WorkerEnvironment
    from paceline.plan.trials.trial import Trial
    from paceline.train.training.state import RankState, SavedState
    from paceline.train.training.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """A rank's part of a global batch; it may be empty (n = 0)."""

    step: int
    epoch: int
    inputs: Tensor  # shape (n, ...), of the model; empty except in the first stage
    targets: Tensor  # shape (n, ...), of the loss
    sample_ids: NDArray[np.int64]  # shape (n,)
    global_samples: int  # samples of the whole batch on all ranks
    is_last: bool = False  # whether it is the last batch of the training


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientResult:
    """Times of one gradient; they add up to the whole call."""

    loss_sum: float  # over the rank's own samples; 0 in all pipeline stages except the last
    forward_s: float
    backward_s: float  # until this rank's last gradient was ready
    comm_s: float | None  # from then until all are summed; None without peers
    comm_ready_unix_s: float | None  # when this rank's last gradient was ready
    bubble_s: float | None = None  # waiting for neighbouring stages; None without a pipeline
    # communication of layers within the passes, in none of the others; None without such layers
    pass_comm_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommunication:
    """Communication within `Stepper.step`: an averaging or a gathering of weights, or the rest of a
    sum of gradients, of which the optimiser has used other gradients meanwhile."""

    comm_s: float  # in which this rank only waited
    # when this rank's weights or gradients were ready; None if it waits for no other rank
    comm_ready_unix_s: float | None
    # when it ended, if this rank has computed since then; None if it only waited
    comm_ended_unix_s: float | None = None


class RankGroups(Protocol):
    """The other ranks, as a strategy sees them."""

    def node(self, purpose: str) -> NodeShare:
        """Return the ranks of this node for one purpose."""

    def world(self, purpose: str) -> NodeShare:
        """Return all ranks for one purpose, as if on one node."""


class Stepper(Protocol):
    """The part of a local strategy that the training loop uses."""

    def for_parts(self, samples: int, task: Callable[[slice], None]) -> None:
        """Call `task` with parts of the samples that together are all of them.

        The loop prepares images so, and a strategy with threads divides the work among them.
        """
        task(slice(0, samples))

    def gradient(self, batch: TrainBatch) -> GradientResult:
        """Compute and sum the gradient; collective over all ranks, also for an empty part."""

    def step(self) -> StepCommunication | None:
        """Step the optimiser; collective. Return the times of its communication, if any."""


class LocalStrategy(Stepper, Protocol):
    """Uses the cores or the device of one rank; the base class of ours, with their defaults."""

    # all ranks stop at a step with a checkpoint until each has copied its state
    pauses_for_checkpoints: ClassVar[bool] = False
    # each replica has an optimiser of its own, which `rank_state` returns as `replica/N/...`
    has_replica_state: ClassVar[bool] = False

    def prepare(
        self, task: Task, model: nn.Module, context: RankContext, trial: Trial, peers: RankGroups
    ) -> None:
        """Take the task and its model (in its memory format); collective.

        The process group, if any, is open.
        """

    def gradients(self) -> dict[str, Tensor]:
        """Return the summed gradients by the model's own names, between `gradient` and `step`.

        Collective over the node. The first rank has the whole model; other ranks may have a part of
        it.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights of the whole model by its own names, on every rank; collective."""

    def buffers_of_replicas(self) -> list[dict[str, Tensor]]:
        """Return the persistent buffers of each replica on this rank by name, where they may
        differ from those in `state_dict`."""
        return []

    def weights_to_evaluate(self) -> dict[str, Tensor]:
        """Return the weights that an evaluation between two steps uses, on every rank; collective.

        They may change with the next step.
        """
        return self.state_dict()

    def updates(self) -> list[UpdateRow]:
        """Return the events of updates without a barrier since the last call, for the records."""
        return []

    def steps_ahead(self) -> int:
        """Return how many steps the fastest rank is ahead of this one, as far as this one knows."""
        return 0

    def settle(self) -> None:
        """Finish the updates that are under way, for a checkpoint after this step; collective.

        Called before `rank_state` if `pauses_for_checkpoints`; all ranks are at the same step.
        """
        raise UsageError(
            f"{type(self).__name__} has no settle(), expected one with pauses_for_checkpoints"
        )

    def rank_state(self) -> RankState | None:
        """Return what this rank owns of the training's state; None in steps that have none.

        Not collective, and called between two steps. The tensors are views of live memory, which
        only `step` may change; in a strategy that pauses, other ranks may change them, too.
        Together the ranks own every element once. After a step that has no state (replicas differ
        until the next averaging), all ranks return None.
        """
        raise UsageError(
            f"{type(self).__name__} has no rank_state(), so it cannot write checkpoints; remove "
            "[checkpoint] and restarts, or use another local strategy"
        )

    def restore(self, saved: SavedState) -> None:  # noqa: ARG002
        """Continue from a saved state, of any layout; collective, called after `prepare`, and again
        after the training to replay steps."""
        raise UsageError(f"{type(self).__name__} has no restore(), expected one with rank_state()")

    def workers(self) -> list[WorkerEnvironment]:
        """Return the actual environments of threads that train replicas; [] if there are none."""
        return []

    def describe(self) -> StrategyResult:
        """Return settings for the records, for example bucket sizes and split points."""
        return {}

    def close(self, *, failed: bool) -> None:
        """End threads and free shared objects; a second call does nothing.

        It does not wait for peers. With `failed`, peers that wait for this rank are notified.
        """
