"""Processes of one node that update the same weights without locks (`hogwild`).

    each process: forward and backward pass of its own samples with the shared weights
    each process: optimiser step on the shared weights, while others read and write them

Nobody waits for another process before the end, except for evaluations. A process may read weights
of which others have written a part, and may overwrite the update of an element that another one
makes at the same time (Recht et al.: Hogwild!: A Lock-Free Approach to Parallelizing Stochastic
Gradient Descent, NIPS 2011). The paper's analysis is about sparse gradients, which rarely meet in
an element; dense ones meet in all of them. The state of the optimiser belongs to each process.

An update of a part of the batch has a part of the learning rate (TaskOptimizer.step_part).
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.collectives.node.shared_node import SharedNode
from paceline.measure.records.communication import StrategyResult
from paceline.measure.records.rows import UpdateRow, own_update
from paceline.plan.trials.trial import RankContext, Trial
from paceline.train.strategies.reduction.flat_layout import (
    FlatReplica,
    shared_arrays,
    shared_floats,
    too_slow,
)
from paceline.train.training.optimizers import TaskOptimizer
from paceline.train.training.passes import run_passes
from paceline.train.training.state import (
    WEIGHTS,
    RankState,
    SavedState,
    persistent_buffers,
    restore_buffers,
    restore_model,
    restore_optimizer,
)
from paceline.train.training.strategy import GradientResult, LocalStrategy, RankGroups, TrainBatch
from paceline.train.training.task import Task

_PAUSE_S = 1e-3  # between two looks at the progress of slower processes
_COUNTER_BYTES = 64  # a cache line for each process


class HogwildStrategy(LocalStrategy):
    """One of the processes of a node."""

    pauses_for_checkpoints = True
    has_replica_state = True

    def __init__(self) -> None:
        self._shared: SharedNode | None = None
        self._seen = 0  # updates of all processes before the forward pass
        self._rows: list[UpdateRow] = []

    def prepare(
        self, task: Task, model: nn.Module, context: RankContext, trial: Trial, peers: RankGroups
    ) -> None:
        """Move the weights into shared memory; collective over the node.

        Raises EnvironmentLacks if the processes cannot share memory.
        """
        self._task, self._trial = task, trial
        self._rank, self._ranks = context.local_rank, context.ranks_on_node
        self._limit_s = trial.limits.collective_s
        self._shared = shared = SharedNode(peers.node("hogwild"), self._limit_s)
        self._barrier = shared.barrier(range(self._ranks))
        memory = partial(shared_floats, shared, "the weights")
        self._replica = FlatReplica(model, memory, copy=self._rank == 0)
        # Updates by process; each writes only its own.
        counters = shared.memory("counters", self._ranks * _COUNTER_BYTES)
        self._counters: NDArray[np.int64] = counters.view(np.int64)[:: _COUNTER_BYTES // 8]
        self._optimizer = TaskOptimizer(task, self._replica.parameters.items())
        self._barrier.wait()  # rank 0 has copied the weights

    def gradient(self, batch: TrainBatch) -> GradientResult:
        """Compute the gradient of this process's samples."""
        self._batch = batch
        self._seen = int(self._counters.sum())
        passed = run_passes(self._task, self._replica.model, batch, self._trial.training)
        return replace(passed.result(alone=True), comm_s=0.0)

    def step(self) -> None:
        """Update the shared weights; after the last step, wait for the others."""
        share = len(self._batch.sample_ids) / self._batch.global_samples
        if share:
            self._replica.require_gradients()
        self._replica.step_part(self._optimizer, share)
        sequence = int(self._counters[self._rank])
        staleness = int(self._counters.sum()) - self._seen
        lead_steps = sequence - int(self._counters.min())
        self._counters[self._rank] = sequence + 1
        self._rows += own_update(
            worker=self._rank,
            sequence=sequence,
            step=self._batch.step,
            staleness=staleness,
            lead_steps=lead_steps,
        )
        if self._batch.is_last:
            self._synchronise()

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of this step, summed over the processes; collective.

        In the first step this is the gradient of the batch, because all processes wait here before
        any of them changes the weights.
        """
        shared, replica = self._shared, self._replica
        assert shared is not None, "prepare comes first"
        flats = shared_arrays(shared, "gradients", [replica.layout.elements] * self._ranks)
        own = replica.named(flats[self._rank])
        for name, gradient in replica.gradients().items():
            own[name].copy_(gradient)
        self._barrier.wait()
        return replica.named(sum(flats[1:], start=flats[0].clone()))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights themselves, which change with every update of any process."""
        return self._replica.state_dict()

    def weights_to_evaluate(self) -> dict[str, Tensor]:
        """Return the weights when all processes have finished this step; collective."""
        self._synchronise()
        return self.state_dict()

    def steps_ahead(self) -> int:
        return int(self._counters.max() - self._counters[self._rank])

    def rank_state(self) -> RankState:
        """Return a shard of the weights, and the optimiser of this process."""
        state, layout = RankState(), self._replica.layout
        for shard in layout.shards(self._ranks)[self._rank]:
            own = layout.elements_of(shard, self._replica.weights[shard.place])
            state.tensors.append(replace(own, name=f"{WEIGHTS}/{own.name}"))
        if self._rank == 0:
            state.add_buffers(persistent_buffers(self._replica.model))
        state.add_optimizer(self._optimizer, prefix=f"replica/{self._rank}/")
        return state

    def restore(self, saved: SavedState) -> None:
        """Continue; with another number of processes, each gets the mean of their optimisers."""
        if self._rank == 0:
            restore_model(self._replica.model, saved)
        else:
            restore_buffers(persistent_buffers(self._replica.model), saved)
        restore_optimizer(self._optimizer, saved.of_replica(self._rank, self._ranks))
        self._counters[self._rank] = saved.steps
        self._barrier.wait()

    def updates(self) -> list[UpdateRow]:
        rows, self._rows = self._rows, []
        return rows

    def describe(self) -> StrategyResult:
        return {"update_mode": "hogwild"}

    def close(self, *, failed: bool) -> None:
        if self._shared is not None:
            self._shared.close(failed=failed)

    def _synchronise(self) -> None:
        """Wait until all processes have made as many updates as this one, and for each other."""
        self.settle()
        self._barrier.wait()

    def settle(self) -> None:
        """Wait until all processes have made as many updates as this one.

        A slow one may take long, so the limit counts from its last update. Raises TimedOut if there
        is no progress, PeerLost if a process failed or died.
        """
        assert self._shared is not None, "prepare comes first"
        own, made = int(self._counters[self._rank]), int(self._counters.sum())
        deadline = time.monotonic() + self._limit_s
        while self._counters.min() < own:
            self._shared.check_peers()
            time.sleep(_PAUSE_S)
            now = int(self._counters.sum())
            if now != made:
                made, deadline = now, time.monotonic() + self._limit_s
            elif time.monotonic() > deadline:
                slow = np.flatnonzero(self._counters < own)
                raise too_slow("local rank", self._rank, slow, own - 1, self._limit_s)
