"""One replica a process, gradients summed in memory that the node's processes share (`processes`).

The node has one copy of the weights; each process has gradients of its own. A step is

    each: forward and backward of its part of the batch; what others own of each gradient, and the
          factors of those of linear layers (see factors.py), are copied into shared memory as the
          backward pass goes
    all meet
    each: sums its slice of the gradients over the node's processes, or computes it from the factors
    on several nodes, each: sums its slice with the processes of the other nodes that own the same,
          through the transport: one gradient a node crosses the wire
    each: steps the optimiser of its slice, which moves the shared weights
    all meet
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.data.node import SoloNode
from paceline.strategies.reduction.flat_layout import FlatLayout, shared_floats
from paceline.strategies.reduction.optimizer_shard import OptimizerShard, sum_of_shards
from paceline.strategies.reduction.replicate_group import ReplicateGroup, join_replicate_group
from paceline.strategies.reduction.shared_gradients import SharedGradients
from paceline.strategies.reduction.sufficient_factors import (
    LowPrecisionWeights,
    RowGradients,
    SharedFactors,
    capture_sufficient_factors,
    rows_of,
)
from paceline.training.loss import run_passes
from paceline.training.strategy import GradientResult, TrainBatch
from paceline.training.transforms import to_input
from paceline.transports.recorder import SHARED_REDUCE, begin_operation
from paceline.transports.shared.barrier import Barrier
from paceline.transports.shared.node import SharedNode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from paceline.plan.trial import Trial
    from paceline.records.rows import WorkerEnvironment
    from paceline.strategies.reduction.flat_layout import ParameterShard
    from paceline.training.context import RankContext
    from paceline.training.strategy import RankGroups


class ProcessesStrategy:
    """One replica of the several on a node, each in a process of its own."""

    def __init__(self) -> None:
        self._shared: SharedNode | None = None
        self._rank = 0  # on this node
        self._ranks = 1
        self._node = ""  # its name in the records
        self._model: nn.Module
        self._trial: Trial
        self._layout: FlatLayout
        self._barrier: Barrier
        self._rows: dict[str, int]  # of the parameters that are dealt out by rows
        self._shards_by_rank: list[list[ParameterShard]]  # by local rank, as what follows
        self._shared_gradients: list[SharedGradients]
        self._shared_factors: list[SharedFactors]
        self._low_precision: LowPrecisionWeights | None = None
        self._shard: OptimizerShard
        self._row_gradients: RowGradients
        self._replicate_group: ReplicateGroup | None = None

    def prepare(
        self, model: nn.Module, context: RankContext, trial: Trial, peers: RankGroups
    ) -> None:
        """Move the weights into shared memory; all ranks come with the same.

        Raises EnvironmentLacks if the ranks of this node cannot share memory, or the nodes have
        different numbers of ranks.
        """
        self._model, self._trial = model, trial
        self._rank, self._ranks = context.local_rank, context.ranks_on_node
        self._node = f"node {context.node_index}"
        limit_s = trial.limits.collective_s
        self._shared = shared = SharedNode(peers.node("gradients") or SoloNode(), limit_s)
        self._layout = FlatLayout.of(model.named_parameters())
        self._barrier = shared.barrier(range(self._ranks))
        weights = shared_floats(shared, "the weights", self._layout.elements)
        parameters = dict(model.named_parameters())
        self._layout.bind(parameters, weights, copy=self._rank == 0)
        self._rows = rows_of(model)
        self._shards_by_rank = self._layout.shards(self._ranks, self._rows)
        own = self._shards_by_rank[self._rank]
        self._shard = OptimizerShard(own, weights, trial.training)
        self._row_gradients = RowGradients(self._layout, own, self._rows)
        self._open_shared_gradients(shared, parameters)
        self._open_shared_factors(shared, weights)
        if trial.placement.nodes > 1:
            group = join_replicate_group(context, peers, limit_s)
            self._replicate_group = ReplicateGroup(trial, group)
        self._barrier.wait()  # the weights are there
        self._refresh()
        self._barrier.wait()

    def _open_shared_gradients(
        self, shared: SharedNode, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        """Of every rank, for the gradients that are summed."""
        summed = [[p for p in parts if p.name not in self._rows] for parts in self._shards_by_rank]
        self._shared_gradients = []
        for rank in range(self._ranks):
            elements = SharedGradients.elements_needed(summed, rank)
            memory = shared_floats(shared, "gradients", elements)
            self._shared_gradients.append(SharedGradients(self._layout, summed, rank, memory))
        self._shared_gradients[self._rank].fill_in_backward(parameters)

    def _open_shared_factors(self, shared: SharedNode, weights: Tensor) -> None:
        """Of every rank, for the factors of those that are computed by rows."""
        trial, model = self._trial, self._model
        bf16 = trial.training.precision == "bf16"
        dtype = torch.bfloat16 if bf16 else torch.float32
        if bf16:
            copied = shared.memory("weights in bfloat16", dtype.itemsize * len(weights))
            self._low_precision = LowPrecisionWeights(
                self._layout, weights, torch.from_numpy(copied).view(dtype), self._rows
            )
        samples = -(-trial.training.global_batch // trial.replicas)
        size = SharedFactors.bytes_needed(model, samples, dtype)
        self._shared_factors = [
            SharedFactors(model, samples, dtype, torch.from_numpy(shared.memory("factors", size)))
            for _ in range(self._ranks)
        ]
        capture_sufficient_factors(
            model, self._shared_factors[self._rank].store, self._low_precision
        )

    def to_input(self, pixels: NDArray[np.uint8]) -> Tensor:
        return to_input(pixels, self._trial.training.memory_format)

    def gradient(self, batch: TrainBatch) -> GradientResult:
        started_s = time.perf_counter()
        passed = run_passes(self._model, batch, self._trial.training)
        operation = begin_operation(
            self._node, self._ranks, SHARED_REDUCE, 4 * self._layout.elements
        )
        self._barrier.wait()
        self._reduce()
        if self._ranks > 1:
            operation.end()
        if self._replicate_group is not None:
            shapes = self._shard.shapes(self._layout)
            self._replicate_group.sum(self._shard.gradient_tensors(), shapes)
        alone = self._ranks == 1 and self._replicate_group is None
        ended_s = time.perf_counter()
        return GradientResult(
            loss_sum=passed.loss_sum,
            forward_s=passed.forwarded_s - started_s,
            backward_s=(ended_s if alone else passed.ready_s) - passed.forwarded_s,
            comm_s=None if alone else ended_s - passed.ready_s,
            comm_ready_unix_s=None if alone else passed.ready_unix_s,
        )

    def step(self) -> None:
        """Ends when the slowest rank of the node has stepped."""
        self._shard.step()
        self._refresh()
        self._barrier.wait()

    def gradients(self) -> dict[str, Tensor]:
        """In memory that the node's ranks share, complete on all of them."""
        shared = self._shared
        assert shared is not None, "prepare comes first"
        whole = shared_floats(shared, "the gradients", self._layout.elements)
        self._shard.put_gradients(whole)
        self._barrier.wait()
        return {name: self._layout.view(whole, name) for name in self._layout.names}

    def state_dict(self) -> dict[str, Tensor]:
        """The weights themselves: they move on with the next step."""
        return dict(self._model.state_dict())

    def workers(self) -> list[WorkerEnvironment]:
        return []

    def describe(self) -> dict[str, Any]:
        slices = [4 * sum(p.stop - p.start for p in parts) for parts in self._shards_by_rank]
        nodes = {} if self._replicate_group is None else self._replicate_group.describe()
        return {"shard_bytes": slices, "by_sufficient_factors": sorted(self._rows), **nodes}

    def close(self, *, failed: bool) -> None:
        if self._replicate_group is not None:
            self._replicate_group.close(failed=failed)
        shared, self._shared = self._shared, None
        if shared is None:
            return
        if failed:
            shared.fail()
        shared.close()

    def _reduce(self) -> None:
        """Sum this rank's slice over the node's processes, once all have met."""
        own = {n: p.grad for n, p in self._model.named_parameters() if p.grad is not None}
        others = [box.read for rank, box in enumerate(self._shared_gradients) if rank != self._rank]
        summed = sum_of_shards(self._layout, own, others)
        factors = [box.read() for box in self._shared_factors]
        self._shard.reduce(self._row_gradients.reader(factors, summed))

    def _refresh(self) -> None:
        """Bring the weights in lower precision, as far as they are this rank's, up to date."""
        if self._low_precision is not None:
            self._low_precision.refresh(self._shard.parts)
