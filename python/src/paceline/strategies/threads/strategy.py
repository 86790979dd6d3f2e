"""Several replicas in one process, each trained by a thread of its own (`threads`).

The replicas are the same weights, seen by k modules: each has gradients of its own, and nothing
else is held twice. A step is

    each thread: forward and backward of its part of the rank's batch
    all meet
    each thread: sums its slice of the gradients over the replicas, straight out of their memory, or
                 computes it from the factors that they kept (see factors.py)
    on several nodes, the main thread: sums the slices over the nodes, through the transport
    each thread: steps the optimiser of its slice

The GIL. Held: Python between operations (layers, dropout keys), a few milliseconds a step. Let go:
every torch operation, the backward pass but for a hook for each parameter and the few lines of
linear.py for each linear layer, numpy's loops over arrays.
"""

from __future__ import annotations

import copy
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.plan.schedule import share_bounds
from paceline.strategies.reduction.flat_layout import FlatLayout
from paceline.strategies.reduction.optimizer_shard import OptimizerShard, shard_of, sum_of_shards
from paceline.strategies.reduction.replicate_group import ReplicateGroup
from paceline.strategies.reduction.sufficient_factors import (
    LowPrecisionWeights,
    RowGradients,
    SufficientFactors,
    capture_sufficient_factors,
    rows_of,
)
from paceline.strategies.threads.worker_pool import WorkerPool
from paceline.training.cores import worker_cores
from paceline.training.loss import PassTimes, run_passes, share_of
from paceline.training.strategy import GradientResult, TrainBatch
from paceline.training.transforms import empty_input, to_input
from paceline.transports.recorder import SHARED_REDUCE, begin_operation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from paceline.plan.trial import Trial
    from paceline.records.rows import WorkerEnvironment
    from paceline.training.context import RankContext
    from paceline.training.strategy import RankGroups


class ThreadsStrategy:
    """k replicas in k threads."""

    def __init__(self) -> None:
        self._pool: WorkerPool | None = None
        self._trial: Trial
        self._group: str  # as the records name it
        self._layout: FlatLayout
        self._replicas: list[nn.Module]
        self._parameters: list[dict[str, nn.Parameter]]
        self._shards: list[OptimizerShard]
        self._rows: dict[str, int]
        self._row_gradients: list[RowGradients]  # by worker, as what follows
        self._factors: list[SufficientFactors]
        self._low_precision: LowPrecisionWeights | None = None
        self._replicate_group: ReplicateGroup | None = None  # None on a single node

    def prepare(
        self,
        model: nn.Module,
        context: RankContext,
        trial: Trial,
        peers: RankGroups,  # noqa: ARG002  (torch's default group has one rank a node)
    ) -> None:
        """Start the threads and give them the model.

        Raises EnvironmentLacks if a thread does not get its cores.
        """
        replicas, threads = trial.thread_replicas, trial.threads_per_worker
        self._trial = trial
        self._group = f"threads of rank {context.rank}"
        if context.world_size > 1:
            self._replicate_group = ReplicateGroup(trial)
        # The main thread's own operations are few, and a pool of its own would be in the way.
        torch.set_num_threads(threads)
        affinity, oversubscribe = list(os.sched_getaffinity(0)), trial.placement.oversubscribe
        cores = [worker_cores(affinity, w, replicas, oversubscribe) for w in range(replicas)]
        limits = trial.limits
        self._pool = WorkerPool(cores, threads, context.rank, limits.collective_s, limits.trial_s)
        self._layout = FlatLayout.of(model.named_parameters())
        weights = torch.empty(self._layout.elements)
        self._layout.bind(dict(model.named_parameters()), weights, copy=True)
        self._replicas = [model, *(_twin(model) for _ in range(1, replicas))]
        self._parameters = [dict(replica.named_parameters()) for replica in self._replicas]
        self._rows = rows_of(model)
        shares = self._layout.shards(replicas, self._rows)
        self._shards = [OptimizerShard(parts, weights, trial.training) for parts in shares]
        self._row_gradients = [RowGradients(self._layout, parts, self._rows) for parts in shares]
        if trial.training.precision == "bf16":
            copy_of_weights = weights.to(torch.bfloat16)
            self._low_precision = LowPrecisionWeights(
                self._layout, weights, copy_of_weights, self._rows
            )
        self._factors = [{} for _ in range(replicas)]
        for replica, factors in zip(self._replicas, self._factors, strict=True):
            capture_sufficient_factors(replica, partial(_store, factors), self._low_precision)
            _stop_between_layers(replica, self._pool)

    def to_input(self, pixels: NDArray[np.uint8]) -> Tensor:
        """Each thread prepares the photos of its own replica."""
        memory_format, replicas = self._trial.training.memory_format, len(self._replicas)
        whole = empty_input(pixels, memory_format)

        def prepare(worker: int) -> None:
            part = slice(*share_bounds(len(pixels), worker, replicas))
            to_input(pixels[part], memory_format, out=whole[part])

        self._running().run(prepare)
        return whole

    def gradient(self, batch: TrainBatch) -> GradientResult:
        """forward_s and backward_s are the slowest replica's, comm_s runs from its last gradient
        to all averaged; None for one replica on one node."""
        pool = self._running()
        started_s = time.perf_counter()
        passed = pool.run(lambda worker: self._pass_and_reduce(pool, worker, batch))
        slowest = max(passed, key=lambda p: p.ready_s)
        if len(passed) > 1:
            size_bytes, ready_unix_s = 4 * self._layout.elements, slowest.ready_unix_s
            begin_operation(self._group, 1, SHARED_REDUCE, size_bytes, ready_unix_s).end()
        if self._replicate_group is not None:
            # All nodes have the same shards: the same tensors in the same order.
            shapes = [shape for shard in self._shards for shape in shard.shapes(self._layout)]
            self._replicate_group.sum(self._reduced(), shapes)
        ended_s = time.perf_counter()
        alone = len(passed) == 1 and self._replicate_group is None
        return GradientResult(
            loss_sum=sum(p.loss_sum for p in passed),
            forward_s=slowest.forwarded_s - started_s,
            backward_s=(ended_s if alone else slowest.ready_s) - slowest.forwarded_s,
            comm_s=None if alone else ended_s - slowest.ready_s,
            comm_ready_unix_s=None if alone else slowest.ready_unix_s,
        )

    def step(self) -> None:
        self._running().run(self._step_shard)

    def gradients(self) -> dict[str, Tensor]:
        """Copies, complete on every rank."""
        whole = torch.zeros(self._layout.elements)
        for shard in self._shards:
            shard.put_gradients(whole)
        return {name: self._layout.view(whole, name) for name in self._layout.names}

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._replicas[0].state_dict())

    def workers(self) -> list[WorkerEnvironment]:
        return self._running().workers

    def describe(self) -> dict[str, Any]:
        return {} if self._replicate_group is None else self._replicate_group.describe()

    def close(self, *, failed: bool) -> None:
        if self._replicate_group is not None:
            self._replicate_group.close(failed=failed)
        if self._pool is not None:
            self._pool.close()

    def _running(self) -> WorkerPool:
        assert self._pool is not None, "prepare comes first"
        return self._pool

    def _pass_and_reduce(self, pool: WorkerPool, worker: int, batch: TrainBatch) -> PassTimes:
        """In a thread: its replica's gradient, and its slice of the sum."""
        share = share_of(batch, worker, len(self._replicas))
        passed = run_passes(self._replicas[worker], share, self._trial.training)
        pool.barrier(worker)
        others = [p for other, p in enumerate(self._parameters) if other != worker]
        summed = sum_of_shards(
            self._layout,
            _gradients(self._parameters[worker]),
            [partial(shard_of, self._layout, _gradients(parameters)) for parameters in others],
        )
        reader = self._row_gradients[worker].reader(self._factors, summed)
        self._shards[worker].reduce(reader)
        return passed

    def _step_shard(self, worker: int) -> None:
        shard = self._shards[worker]
        shard.step()
        if self._low_precision is not None:
            self._low_precision.refresh(shard.parts)

    def _reduced(self) -> list[Tensor]:
        return [tensor for shard in self._shards for tensor in shard.gradient_tensors()]


def _store(
    factors: SufficientFactors, layer: str, inputs: Tensor, outputs_gradients: Tensor
) -> None:
    factors[layer] = (inputs, outputs_gradients)


def _twin(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters are its own, but hold the very same weights."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.data) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def _stop_between_layers(replica: nn.Module, pool: WorkerPool) -> None:
    """Let passes of a pool that is being closed end at the next layer, instead of at their end."""
    for module in replica.modules():
        module.register_forward_pre_hook(pool.raise_if_stopped)
    for parameter in replica.parameters():
        parameter.register_post_accumulate_grad_hook(pool.raise_if_stopped)  # type: ignore[no-untyped-call]


def _gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}
