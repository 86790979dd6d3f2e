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
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.plan.schedule import share_bounds
from paceline.train.cores import worker_cores
from paceline.train.strategies.base import GradientResult, TrainBatch
from paceline.train.strategies.counterparts import sum_over
from paceline.train.strategies.crew import Crew
from paceline.train.strategies.factors import (
    Factors,
    LowPrecisionWeights,
    RowGradients,
    keep_factors,
    rows_of,
)
from paceline.train.strategies.flat import FlatLayout
from paceline.train.strategies.loss import share_of, sum_of_losses
from paceline.train.strategies.shard import Shard, piece_of, sum_of_pieces
from paceline.train.transforms import empty_input, to_input

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from paceline.plan.trial import Trial
    from paceline.records.rows import WorkerEnvironment
    from paceline.train.context import RankContext
    from paceline.train.strategies.base import Neighbours


@dataclass(frozen=True, slots=True)
class _Passed:
    """One replica's passes: times of perf_counter."""

    loss_sum: float
    forwarded_s: float
    ready_s: float
    ready_unix_s: float


class ThreadsStrategy:
    """k replicas in k threads."""

    def __init__(self) -> None:
        self._crew: Crew | None = None
        self._trial: Trial
        self._layout: FlatLayout
        self._replicas: list[nn.Module]
        self._parameters: list[dict[str, nn.Parameter]]
        self._shards: list[Shard]
        self._rows: dict[str, int]
        self._row_gradients: list[RowGradients]  # by worker, as what follows
        self._factors: list[Factors]
        self._low_precision: LowPrecisionWeights | None = None
        self._across_nodes = False

    def prepare(
        self,
        model: nn.Module,
        context: RankContext,
        trial: Trial,
        peers: Neighbours,  # noqa: ARG002  (torch's default group has one rank a node)
    ) -> None:
        """Start the threads and give them the model.

        Raises EnvironmentLacks if a thread does not get its cores.
        """
        replicas, threads = trial.thread_replicas, trial.threads_per_worker
        self._trial = trial
        self._across_nodes = context.world_size > 1
        # The main thread's own operations are few, and a pool of its own would be in the way.
        torch.set_num_threads(threads)
        affinity, oversubscribe = list(os.sched_getaffinity(0)), trial.placement.oversubscribe
        cores = [worker_cores(affinity, w, replicas, oversubscribe) for w in range(replicas)]
        limits = trial.limits
        self._crew = Crew(cores, threads, context.rank, limits.collective_s, limits.trial_s)
        self._layout = FlatLayout.of(model.named_parameters())
        weights = torch.empty(self._layout.elements)
        self._layout.bind(dict(model.named_parameters()), weights, copy=True)
        self._replicas = [model, *(_twin(model) for _ in range(1, replicas))]
        self._parameters = [dict(replica.named_parameters()) for replica in self._replicas]
        self._rows = rows_of(model)
        shares = self._layout.shares(replicas, self._rows)
        self._shards = [Shard(pieces, weights, trial.training) for pieces in shares]
        self._row_gradients = [RowGradients(self._layout, pieces, self._rows) for pieces in shares]
        if trial.training.precision == "bf16":
            copy_of_weights = weights.to(torch.bfloat16)
            self._low_precision = LowPrecisionWeights(self._layout, weights, copy_of_weights)
        self._factors = [{} for _ in range(replicas)]
        for replica, factors in zip(self._replicas, self._factors, strict=True):
            keep_factors(replica, partial(_store, factors), self._low_precision)
            _stop_between_layers(replica, self._crew)

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
        crew = self._running()
        started_s = time.perf_counter()
        passed = crew.run(lambda worker: self._pass_and_reduce(crew, worker, batch))
        if self._across_nodes:
            # All nodes have the same shards: the same tensors in the same order.
            sum_over(self._reduced())
        ended_s = time.perf_counter()
        slowest = max(passed, key=lambda p: p.ready_s)
        alone = len(passed) == 1 and not self._across_nodes
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
        if not self._across_nodes:
            return {}
        return {"bucket_bytes": [4 * g.numel() for g in self._reduced()]}

    def close(self, *, failed: bool) -> None:  # noqa: ARG002  (no peer waits for this rank here)
        if self._crew is not None:
            self._crew.close()

    def _running(self) -> Crew:
        assert self._crew is not None, "prepare comes first"
        return self._crew

    def _pass_and_reduce(self, crew: Crew, worker: int, batch: TrainBatch) -> _Passed:
        """In a thread: its replica's gradient, and its slice of the sum."""
        passed = self._pass(worker, share_of(batch, worker, len(self._replicas)), batch)
        crew.meet(worker)
        others = [p for other, p in enumerate(self._parameters) if other != worker]
        summed = sum_of_pieces(
            self._layout,
            _gradients(self._parameters[worker]),
            [partial(piece_of, self._layout, _gradients(parameters)) for parameters in others],
        )
        reader = self._row_gradients[worker].reader(self._factors, summed)
        self._shards[worker].reduce(reader)
        return passed

    def _step_shard(self, worker: int) -> None:
        shard = self._shards[worker]
        shard.step()
        if self._low_precision is not None:
            self._low_precision.refresh([p for p in shard.pieces if p.name in self._rows])

    def _pass(self, worker: int, share: TrainBatch, batch: TrainBatch) -> _Passed:
        replica, training = self._replicas[worker], self._trial.training
        for parameter in replica.parameters():
            parameter.grad = None
        loss = sum_of_losses(replica, share, training)
        loss_sum = float(loss.detach())
        forwarded_s = time.perf_counter()
        (loss / batch.global_samples).backward()  # type: ignore[no-untyped-call]
        return _Passed(loss_sum, forwarded_s, time.perf_counter(), time.time())

    def _reduced(self) -> list[Tensor]:
        return [tensor for shard in self._shards for tensor in shard.gradient_tensors()]


def _store(factors: Factors, layer: str, inputs: Tensor, outputs_gradients: Tensor) -> None:
    factors[layer] = (inputs, outputs_gradients)


def _twin(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters are its own, but hold the very same weights."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.data) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def _stop_between_layers(replica: nn.Module, crew: Crew) -> None:
    """Let passes of a crew that is being closed end at the next layer, instead of at their end."""
    for module in replica.modules():
        module.register_forward_pre_hook(crew.check_going)
    for parameter in replica.parameters():
        parameter.register_post_accumulate_grad_hook(crew.check_going)  # type: ignore[no-untyped-call]


def _gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}
