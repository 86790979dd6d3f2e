"""The shard of the weights that one server owns, and when it applies gradients.

This is the state of a server without its communication. Every call is about one worker; the caller
makes calls of different threads one after the other.

    synchronous:        the sum of all workers' gradients of a step is one update
    all other modes:    every gradient is an update, in the order of arrival

A clock is the number of steps that a worker has finished. A worker at clock c may get weights that
need clock n as soon as no worker's clock is below n.

Updates are counted by (worker, sequence number). A number that is missing or repeated means that an
update was lost or arrived twice, which no later result could show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.errors import RankFailed
from paceline.records.rows import UpdateRow
from paceline.strategies.reduction.optimizer_shard import OptimizerShard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.strategies.parameter_server.descriptor import ParameterServerOptions
    from paceline.strategies.reduction.flat_layout import FlatLayout, ParameterShard
    from paceline.training.state import RankState, SavedState
    from paceline.training.task import Task

_COUNTS = "updates"  # values of a state, by server: the number of updates of each worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One push of a worker, without the gradient.

    share: samples of the gradient / samples of the batch, summed over the steps of the push.
    """

    worker: int
    sequence: int
    step: int  # last step whose gradient it includes
    version: int  # of the shard that the worker used
    share: float


class ServerShard:
    """Weights of one server with their optimiser.

    weights: shape (elements,), float32. version: number of updates that were applied.
    """

    def __init__(
        self,
        layout: FlatLayout,
        shards: Sequence[ParameterShard],
        initial: Tensor,
        task: Task,
        *,
        rank: int,
        workers: int,
        options: ParameterServerOptions,
    ) -> None:
        """layout: of `initial`, the flat weights of the whole model. shards: parts of parameters
        that follow one another there. rank: of this server. The largest lead of a worker over the
        slowest one is checked if the options bound it."""
        self._rank, self._bound_steps = rank, options.staleness_bound_steps
        self._synchronous = options.update_mode == "synchronous"
        self.place = place_of(shards)
        self.weights = initial[self.place].clone()
        self.version = 0
        self.clocks = [0] * workers
        self._pushed = [0] * workers
        self._rows: list[UpdateRow] = []
        self._collected: dict[int, tuple[Update, Tensor]] = {}
        self._gradient = torch.zeros_like(self.weights)
        self._shard = OptimizerShard(layout, shards, self.weights, task, first=self.place.start)

    def push(self, update: Update, gradient: Tensor) -> None:
        """Take a worker's gradient of the mean loss over the batch, shape (elements,).

        It is the part of its own samples, so those of all workers add up to the gradient of the
        batch; it is not changed. In synchronous mode it is kept until all workers have pushed.
        Raises RankFailed if an update is missing or repeated, or a worker is too far ahead.
        """
        self._check_sequence(update.worker, update.sequence)
        self._pushed[update.worker] += 1
        lead_steps = self.clocks[update.worker] - min(self.clocks)
        self._check_lead(update.worker, lead_steps)
        self.clocks[update.worker] = update.step + 1
        self._rows.append(
            UpdateRow(
                event="applied",
                worker=update.worker,
                sequence=update.sequence,
                step=update.step,
                staleness=self.version - update.version,
                lead_steps=lead_steps,
            )
        )
        if not self._synchronous:
            self._apply(gradient, update.share)
            return
        self._collected[update.worker] = update, gradient
        if len(self._collected) == len(self.clocks):
            # In the order of the ranks, so that the sum has the same bits in every run.
            ordered = [self._collected[worker] for worker in sorted(self._collected)]
            self._collected = {}
            total = torch.stack([each for _, each in ordered]).sum(0)
            self._apply(total, sum(each.share for each, _ in ordered))

    def advance(self, worker: int, clock: int, pushed: int) -> None:
        """Note that a worker has finished `clock` steps and made `pushed` pushes.

        Raises RankFailed if one of the pushes is missing.
        """
        self._check_sequence(worker, pushed)
        self.clocks[worker] = max(self.clocks[worker], clock)

    def may_fetch(self, needed_clock: int) -> bool:
        """Return whether all workers have finished so many steps."""
        return min(self.clocks) >= needed_clock

    def slowest(self) -> list[int]:
        """Return the workers with the smallest clock."""
        return [worker for worker, clock in enumerate(self.clocks) if clock == min(self.clocks)]

    def add_to(self, state: RankState) -> None:
        """Add the weights, the optimiser's state and the counts of updates by worker."""
        self._shard.add_to(state)
        state.values[f"{_COUNTS}/{self._rank}"] = list(self._pushed)

    def restore(self, saved: SavedState) -> list[int]:
        """Continue from a saved state.

        Return the number of updates of each worker so far. They begin with 0 if the state is not of
        servers for as many workers. Raises DataError if the state is of another model.
        """
        self._shard.restore(saved)
        workers = len(self.clocks)
        counts = saved.value(f"{_COUNTS}/{self._rank}")
        self._pushed = list(counts) if _are_counts(counts, workers) else [0] * workers
        self.clocks = [saved.steps] * workers
        return list(self._pushed)

    def take_rows(self) -> list[UpdateRow]:
        """Return the rows of the updates since the last call."""
        rows, self._rows = self._rows, []
        return rows

    def _apply(self, gradient: Tensor, share: float) -> None:
        if share > 0:
            torch.div(gradient, share, out=self._gradient)
            self._shard.set_gradients(self._gradient)
            self._shard.step_part(share)
        self.version += 1

    def _check_sequence(self, worker: int, sequence: int) -> None:
        expected = self._pushed[worker]
        if sequence == expected:
            return
        fault = "was lost" if sequence > expected else "arrived twice"
        number = min(sequence, expected)
        raise RankFailed(
            f"rank {self._rank}: update {number} of rank {worker} {fault} (expected update "
            f"{expected}, got {sequence}), so the weights are wrong. This is a defect of the "
            "transport or the strategy; please report it",
            self._rank,
        )

    def _check_lead(self, worker: int, lead_steps: int) -> None:
        if self._bound_steps is not None and lead_steps > self._bound_steps:
            raise RankFailed(
                f"rank {self._rank}: rank {worker} is {lead_steps} steps ahead of the slowest "
                f"rank, expected at most {self._bound_steps} (staleness_bound_steps). This is a "
                "defect of the strategy; please report it",
                self._rank,
            )


def _are_counts(value: object, workers: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == workers
        and all(type(count) is int and count >= 0 for count in value)
    )


def place_of(shards: Sequence[ParameterShard]) -> slice:
    """Return the elements of the flat array from the first shard to the last one."""
    if not shards:
        return slice(0, 0)
    return slice(shards[0].offset, shards[-1].place.stop)
