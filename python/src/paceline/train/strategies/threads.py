"""Several replicas in one process, each trained by a thread of its own (`threads`).

k modules share one copy of the weights. Each has its own gradients, and nothing else is stored
twice. A step is

    each thread: forward and backward pass of its part of the rank's batch
    barrier
    each thread: sums its shards of the gradients over the replicas, directly from their memory, or
                 computes them from sufficient factors (see sufficient_factors.py)
    on several nodes, the main thread: sums the shards over the nodes through the transport, except
                 for linear layers whose factors were gathered (see factor_exchange.py)
    each thread: optimiser step of its shards

Python's global interpreter lock is held between operations (layers, dropout keys), a few
milliseconds a step. It is released during every torch operation, during the backward pass except
for a hook per parameter and a few lines of linear.py per linear layer, and in numpy's loops over
arrays.
"""

from __future__ import annotations

import copy
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from paceline.collectives.device_clock import unix_s
from paceline.collectives.message_schedules import share_bounds
from paceline.collectives.recorder import SHARED_REDUCE, PassCommunication, begin_operation
from paceline.measure.records.rows import WorkerEnvironment
from paceline.plan.trials.trial import RankContext, Trial
from paceline.train.strategies.reduction.factor_exchange import NodeFactors
from paceline.train.strategies.reduction.flat_layout import FlatLayout, gradients_of, touch
from paceline.train.strategies.reduction.node_shards import (
    OptimizerShard,
    ShardedStrategy,
    shard_of,
)
from paceline.train.strategies.reduction.replicate_group import ReplicateGroup
from paceline.train.strategies.reduction.shared_sums import SharedSum
from paceline.train.strategies.reduction.sufficient_factors import (
    LowPrecisionWeights,
    SufficientFactors,
    capture,
    linear_layers,
    rows_of,
)
from paceline.train.strategies.worker_pool import WorkerPool
from paceline.train.training.batch_norm import statistics_width, synchronise
from paceline.train.training.optimizers import trained_parameters
from paceline.train.training.passes import Passes, run_passes, share_of
from paceline.train.training.resources import worker_cores
from paceline.train.training.state import persistent_buffers
from paceline.train.training.strategy import GradientResult, RankGroups, TrainBatch
from paceline.train.training.task import Task
from paceline.train.training.tensors import joined


class ThreadsStrategy(ShardedStrategy):
    """k replicas in k threads."""

    def __init__(self) -> None:
        super().__init__()
        self._pool: WorkerPool | None = None

    def prepare(
        self,
        task: Task,
        model: nn.Module,
        context: RankContext,
        trial: Trial,
        peers: RankGroups,  # noqa: ARG002  (torch's default group has one rank a node)
    ) -> None:
        """Start the threads and share the model among them.

        Raises EnvironmentLacks if a thread does not get its cores.
        """
        replicas, threads = trial.placement.replicas_per_rank, trial.placement.threads_per_worker
        self._task, self._trial = task, trial
        self._group, self._saves_shards = f"threads of rank {context.rank}", context.is_first
        self._replicate_group = ReplicateGroup(trial)
        # The main thread runs few operations, and a larger thread pool would take cores.
        torch.set_num_threads(threads)
        affinity, oversubscribe = list(os.sched_getaffinity(0)), trial.placement.oversubscribe
        cores = [worker_cores(affinity, w, replicas, oversubscribe) for w in range(replicas)]
        limits = trial.limits
        self._pool = WorkerPool(cores, threads, context.rank, limits.collective_s, limits.trial_s)
        self._layout = FlatLayout.of(trained_parameters(model).items())
        layers = linear_layers(model, task.example_input())
        rows = rows_of(layers)
        shards = self._layout.shards(replicas, rows)
        weights = _fresh_floats(self._layout.elements)
        self._pool.run(lambda worker: touch(shards[worker], weights))
        self._layout.bind(trained_parameters(model), weights, copy=True)
        self._node_factors = NodeFactors(trial)
        self._node_factors.join(layers, self._replicate_group, owners=1, workers=replicas)
        self._replicas: list[nn.Module] = [model, *(_twin(model) for _ in range(1, replicas))]
        self._parameters = [trained_parameters(replica) for replica in self._replicas]
        low_precision = None
        if trial.training.precision == "bf16":
            copy_of_weights = weights.to(torch.bfloat16)
            low_precision = LowPrecisionWeights(self._layout, weights, copy_of_weights, rows)
        self._shards = [
            OptimizerShard(self._layout, owned, weights, task, rows, low_precision)
            for owned in shards
        ]
        self._pass_communication: list[PassCommunication | None] = [None] * replicas
        if trial.placement.replicas > 1:
            self._synchronise_statistics(model)
        self._factors: list[SufficientFactors] = [{} for _ in range(replicas)]
        for worker, replica in enumerate(self._replicas):
            capture(
                {name: cast("nn.Linear", replica.get_submodule(name)) for name in layers},
                partial(self._keep, worker),
                low_precision,
                partial(self._node_factors.keep_inputs, worker=worker),
            )
            _stop_between_layers(replica, self._pool)

    def _synchronise_statistics(self, model: nn.Module) -> None:
        """Sum the statistics of batch normalisation over all replicas, also of other nodes."""
        pool, replicas = self._threads(), len(self._replicas)
        rows = np.zeros((2 * replicas, max(1, statistics_width(model))))
        sum_over_nodes = self._replicate_group.sum_vector
        for worker, replica in enumerate(self._replicas):
            wait = partial(pool.barrier, worker)
            total = SharedSum(rows, range(replicas), worker, wait, sum_over_nodes)
            self._pass_communication[worker] = synchronise(
                replica, total, self._trial.training.batch_norm
            )

    def for_parts(self, samples: int, task: Callable[[slice], None]) -> None:
        """Let each thread prepare the images of its own replica."""
        replicas = len(self._replicas)
        self._threads().run(lambda worker: task(slice(*share_bounds(samples, worker, replicas))))

    def gradient(self, batch: TrainBatch) -> GradientResult:
        """Compute and sum the gradients.

        forward_s and backward_s are those of the slowest replica. comm_s runs from its last
        gradient until all are summed; None for one replica on one node.
        """
        pool = self._threads()
        started_s = time.perf_counter()
        self._node_factors.begin(batch.global_samples)
        passed = pool.run(lambda worker: self._pass_and_reduce(pool, worker, batch))
        slowest = max(passed, key=lambda p: p.own_ready_s)
        if len(passed) > 1:
            size_bytes, ready_unix_s = 4 * self._layout.elements, unix_s(slowest.ready_s)
            begin_operation(self._group, 1, SHARED_REDUCE, size_bytes, ready_unix_s).end()
        self._sum_over_nodes()
        loss_sum = sum(p.loss_sum for p in passed)
        whole = replace(slowest, loss_sum=loss_sum, started_s=started_s)
        return whole.result(alone=self._trial.placement.replicas == 1)

    def step(self) -> None:
        squared_norm = self._squared_norm()
        self._threads().run(lambda worker: self._shards[worker].step(squared_norm))

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._replicas[0].state_dict())

    def buffers_of_replicas(self) -> list[dict[str, Tensor]]:
        return [persistent_buffers(replica) for replica in self._replicas]

    def workers(self) -> list[WorkerEnvironment]:
        return self._threads().workers

    def close(self, *, failed: bool) -> None:
        super().close(failed=failed)
        if self._pool is not None:
            self._pool.close()

    def _threads(self) -> WorkerPool:
        assert self._pool is not None, "prepare comes first"
        return self._pool

    def _pass_and_reduce(self, pool: WorkerPool, worker: int, batch: TrainBatch) -> Passes:
        """In a thread, compute its replica's gradient, then sum its shards over the replicas."""
        share = share_of(batch, worker, len(self._replicas))
        self._factors[worker].clear()
        passed = run_passes(
            self._task,
            self._replicas[worker],
            share,
            self._trial.training,
            accumulating=partial(self._node_factors.accumulating, worker),
            communication=self._pass_communication[worker],
        )
        pool.barrier(worker)
        if self._node_factors.layers:
            if worker == 0:
                self._factors[0] |= self._node_factors.gathered()
            pool.barrier(worker)
        self._reduce(worker)
        return passed

    def _reduce(self, worker: int) -> None:
        """Sum a worker's shards over the replicas, or compute them from sufficient factors."""
        gradients = [gradients_of(parameters.items()) for parameters in self._parameters]
        own = gradients.pop(worker)
        others = [partial(shard_of, self._layout, replica) for replica in gradients]
        self._shards[worker].reduce(own, others, self._factors)

    def _keep(self, worker: int, layer: str, inputs: Tensor, outputs_gradients: Tensor) -> None:
        """Send the factors of a pass to other nodes, or keep them for the threads."""
        if not self._node_factors.keep_gradients(layer, outputs_gradients, worker):
            _store(self._factors[worker], layer, inputs, outputs_gradients)


def _store(
    factors: SufficientFactors, layer: str, inputs: Tensor, outputs_gradients: Tensor
) -> None:
    """Keep the factors of a pass behind those of the step's earlier passes."""
    if layer in factors:
        earlier_inputs, earlier_gradients = factors[layer]
        inputs = joined([earlier_inputs, inputs])
        outputs_gradients = joined([earlier_gradients, outputs_gradients])
    factors[layer] = (inputs, outputs_gradients)


def _fresh_floats(elements: int) -> Tensor:
    """Return zeros of shape (elements,) in pages that exist once a thread has touched them."""
    memory = mmap.mmap(-1, 4 * elements, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float32)


def _twin(model: nn.Module) -> nn.Module:
    """Copy the model with parameters of its own that share the memory of the weights."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


def _stop_between_layers(replica: nn.Module, pool: WorkerPool) -> None:
    """Make passes end at the next layer when the pool is being closed."""
    for module in replica.modules():
        module.register_forward_pre_hook(pool.raise_if_stopped)
    for parameter in trained_parameters(replica).values():
        parameter.register_post_accumulate_grad_hook(pool.raise_if_stopped)  # type: ignore[no-untyped-call]
