"""One replica per process, gradients summed in shared memory of the node (`processes`).

The node has one copy of the weights; each process has its own gradients. A step is

    each: forward and backward pass of its part of the batch. Gradients that others own, and the
          sufficient factors of linear layers (see sufficient_factors.py), are copied into shared
          memory during the backward pass. On several nodes, factors of some layers are gathered
          over the replicate group first (see factor_exchange.py)
    barrier
    each: sums its shards over the processes of the node, or computes them from the factors
    on several nodes, each: sums its other shards over its replicate group through the transport, so
          that one gradient per node crosses the network
    each: optimiser step of its shards, which changes the shared weights
    barrier

With the reduction `zero-1` the nodes divide the updates of a shard, too (see zero.py).
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.collectives.node.shared_node import SharedNode
from paceline.collectives.recorder import (
    SHARED_REDUCE,
    PassCommunication,
    begin_operation,
    not_recording,
)
from paceline.measure.records.communication import StrategyResult
from paceline.plan.trials.trial import RankContext, Trial
from paceline.train.strategies.reduction.factor_exchange import NodeFactors
from paceline.train.strategies.reduction.flat_layout import (
    FlatLayout,
    ParameterShard,
    gradients_of,
    shared_floats,
    touch,
)
from paceline.train.strategies.reduction.node_shards import (
    OptimizerShard,
    ShardedStrategy,
    ZeroExchange,
)
from paceline.train.strategies.reduction.replicate_group import ReplicateGroup
from paceline.train.strategies.reduction.shared_sums import SharedGradients, SharedSum, shared_rows
from paceline.train.strategies.reduction.sufficient_factors import (
    LowPrecisionWeights,
    SharedFactors,
    capture,
    linear_layers,
    rows_of,
)
from paceline.train.training.batch_norm import statistics_width, synchronise
from paceline.train.training.compilation import compile_model
from paceline.train.training.optimizers import LossScale, trained_parameters
from paceline.train.training.passes import Passes, run_passes, working_dtype
from paceline.train.training.state import persistent_buffers
from paceline.train.training.strategy import (
    GradientResult,
    RankGroups,
    StepCommunication,
    TrainBatch,
)
from paceline.train.training.task import Task
from paceline.train.transports.bucket_settings import gradient_options_of

# A process keeps two such buffers. Two of 25 MB would need nearly as much as each of four ranks
# on two nodes saves by dividing the momentum of AlexNet.
_ZERO_MESSAGE_MB = 4.0


class SharedShardsStrategy(ShardedStrategy):
    """One of the replicas of a node, each in its own process."""

    def __init__(self) -> None:
        super().__init__()
        self._pass_communication: PassCommunication | None = None
        self._zero: ZeroExchange | None = None  # None if each node updates all weights
        self._ready_unix_s: float | None = None  # the gradients of the last batch, on this rank

    def prepare(
        self, task: Task, model: nn.Module, context: RankContext, trial: Trial, peers: RankGroups
    ) -> None:
        """Move the weights into shared memory; all ranks start with equal weights.

        Raises EnvironmentLacks if the ranks of this node cannot share memory, or the nodes have
        different numbers of ranks.
        """
        self._task, self._model, self._trial = task, model, trial
        self._rank, self._ranks = context.local_rank, context.ranks_on_node
        # the name of the workers in the records
        self._node = f"node {context.node_index}"
        divides_updates = trial.reduction.divides_updates_among_nodes
        updating_nodes = trial.placement.nodes if divides_updates else 1
        self._saves_shards = updating_nodes > 1 or context.node_index == 0
        self._saves_buffers = context.node_index == self._rank == 0
        limit_s = trial.limits.collective_s
        self._shared = shared = SharedNode(peers.node("gradients"), limit_s)
        parameters = trained_parameters(model)
        self._layout = FlatLayout.of(parameters.items())
        self._barrier = shared.barrier(range(self._ranks))
        self._factor_layers = linear_layers(model, task.example_input())
        rows = rows_of(self._factor_layers)
        self._replicate_group = ReplicateGroup.join(trial, context, peers)
        self._node_factors = NodeFactors(trial)
        self._node_factors.join(self._factor_layers, self._replicate_group, owners=self._ranks)
        shards = self._layout.shards(self._ranks * updating_nodes, rows)
        by_rank = [shards[n : n + updating_nodes] for n in range(0, len(shards), updating_nodes)]
        self._shards_by_rank = [list(chain.from_iterable(each)) for each in by_rank]
        own_shards = self._shards_by_rank[self._rank]
        weights = shared_floats(shared, "the weights", self._layout.elements)
        touch(own_shards, weights)
        self._barrier.wait()
        self._layout.bind(parameters, weights, copy=self._rank == 0)
        summed = [[s for s in shards if s.name not in rows] for shards in self._shards_by_rank]
        self._shared_gradients = SharedGradients.of_workers(shared, self._layout, summed)
        self._shared_gradients[self._rank].write_in_backward(parameters)
        low_precision = self._open_low_precision(shared, weights, rows)
        self._open_shared_factors(shared, low_precision)
        self._scale = LossScale.of(trial.training)
        self._open_shards(by_rank[self._rank], weights, rows, low_precision)
        vectors = shared_rows(shared, "sums", self._ranks, max(1, statistics_width(model)))
        place, wait = (range(self._ranks), self._rank), self._barrier.wait
        sum_of_owners = None if self._zero is None else self._zero.sum_vector
        self._total_of_owners = SharedSum(vectors, *place, wait, sum_of_owners)
        if trial.placement.replicas > 1:
            total = SharedSum(vectors, *place, wait, self._replicate_group.sum_vector)
            self._pass_communication = synchronise(model, total, trial.training.batch_norm)
        compile_model(model, trial.training)
        self._barrier.wait()  # rank 0 has copied the weights
        self._refresh()
        self._barrier.wait()

    def _open_shards(
        self,
        by_node: Sequence[Sequence[ParameterShard]],
        weights: Tensor,
        rows: Mapping[str, int],
        low_precision: LowPrecisionWeights | None,
    ) -> None:
        """Create the shards that this rank sums, and the optimiser of those that it updates.

        by_node: by rank of the replicate group, if its nodes divide the updates.
        """
        group = self._replicate_group.group
        own = dist.get_rank(group) if len(by_node) > 1 else 0
        self._shards = [
            OptimizerShard(
                self._layout,
                shards,
                weights,
                self._task if number == own else None,
                rows,
                low_precision,
                scale=self._scale,
            )
            for number, shards in enumerate(by_node)
        ]
        if len(by_node) > 1:
            message_mb = min(gradient_options_of(self._trial).bucket_mb, _ZERO_MESSAGE_MB)
            self._zero = ZeroExchange(self._shards, group, message_mb)

    def _refresh(self) -> None:
        """Update the weights in lower precision."""
        for shard in self._shards:
            shard.refresh()

    def _open_low_precision(
        self, shared: SharedNode, weights: Tensor, rows: Container[str]
    ) -> LowPrecisionWeights | None:
        """Open the memory for weights in lower precision, if the training uses them."""
        if self._trial.training.precision != "bf16":
            return None
        dtype = torch.bfloat16
        memory = shared.memory("weights in bfloat16", dtype.itemsize * len(weights))
        copy = torch.from_numpy(memory).view(dtype)
        return LowPrecisionWeights(self._layout, weights, copy, rows)

    def _open_shared_factors(
        self, shared: SharedNode, low_precision: LowPrecisionWeights | None
    ) -> None:
        """Open the memory of every rank for sufficient factors."""
        trial, layers, nodes = self._trial, self._factor_layers, self._node_factors
        dtype = working_dtype(trial.training)
        most = trial.placement.samples_of_a_replica(trial.training.global_batch)
        samples = {name: nodes.rows(name, most) for name in layers}
        size = SharedFactors.bytes_needed(layers, samples, dtype)
        memories = shared.memories("factors", [size] * self._ranks)
        self._shared_factors = [
            SharedFactors(layers, samples, dtype, torch.from_numpy(each)) for each in memories
        ]
        capture(layers, self._keep, low_precision, nodes.keep_inputs)

    def _keep(self, layer: str, inputs: Tensor, outputs_gradients: Tensor) -> None:
        """Send the factors of a pass to other nodes, or copy them into shared memory."""
        if not self._node_factors.keep_gradients(layer, outputs_gradients):
            self._shared_factors[self._rank].store(layer, inputs, outputs_gradients)

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        """Publish nothing meanwhile, because a later pass adds to it."""
        with self._shared_gradients[self._rank].accumulating(), self._node_factors.accumulating():
            yield

    def gradient(self, batch: TrainBatch) -> GradientResult:
        factors = self._shared_factors[self._rank]
        factors.begin()
        self._node_factors.begin(batch.global_samples)
        passed = run_passes(
            self._task,
            self._model,
            batch,
            self._trial.training,
            accumulating=self._accumulating,
            communication=self._pass_communication,
            scale=self._scale.value,
        )
        for layer, of_all_nodes in self._node_factors.gathered().items():
            factors.store(layer, *of_all_nodes)
        operation = begin_operation(
            self._node, self._ranks, SHARED_REDUCE, 4 * self._layout.elements
        )
        self._barrier.wait()
        self._reduce()
        if self._ranks > 1:
            operation.end()
        if self._zero is not None:
            return self._scatter(self._zero, passed)
        self._sum_over_nodes()
        return passed.result(alone=self._trial.placement.replicas == 1)

    def _scatter(self, zero: ZeroExchange, passed: Passes) -> GradientResult:
        """Sum what this rank updates over the nodes. Copies to and from messages count as a part of
        the backward pass."""
        began_s, before_s = time.perf_counter(), zero.communication.total_s
        zero.reduce_scatter()
        waited_s = zero.communication.total_s - before_s
        copies_s = time.perf_counter() - began_s - waited_s
        result = passed.result(alone=False)
        assert result.comm_s is not None, "there are peers"
        self._ready_unix_s = result.comm_ready_unix_s
        return replace(
            result, backward_s=result.backward_s + copies_s, comm_s=result.comm_s - copies_s
        )

    def step(self) -> StepCommunication | None:
        """Step the optimiser; ends when the slowest rank of the node has stepped."""
        zero = self._zero
        before_s = 0.0 if zero is None else zero.communication.total_s
        squared_norm = self._squared_norm()
        for shard in self._shards:
            shard.step(squared_norm)
        self._scale.update(squared_norm)
        sent = None
        if zero is not None:
            zero.all_gather(OptimizerShard.weights)
            sent = StepCommunication(
                comm_s=zero.communication.total_s - before_s,
                comm_ready_unix_s=self._ready_unix_s,
                comm_ended_unix_s=time.time(),
            )
            self._refresh()
        self._barrier.wait()
        return sent

    def gradients(self) -> dict[str, Tensor]:
        if self._zero is not None:
            with not_recording():  # it is no part of a step
                self._zero.all_gather(OptimizerShard.gradient_tensors)
        return super().gradients()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights themselves, which change with the next step."""
        return dict(self._model.state_dict())

    def _wait_for_node(self) -> None:
        self._barrier.wait()

    def buffers_of_replicas(self) -> list[dict[str, Tensor]]:
        return [persistent_buffers(self._model)]

    def describe(self) -> StrategyResult:
        sizes = [4 * sum(s.elements for s in shards) for shards in self._shards_by_rank]
        zero: StrategyResult = {} if self._zero is None else self._zero.describe()
        return {"shard_bytes": sizes, **super().describe(), **zero}

    def _reduce(self) -> None:
        """Sum this rank's shards over the node's processes, or compute them from sufficient
        factors.

        Call it after the barrier at which all processes have written their gradients and factors.
        """
        own = gradients_of(self._model.named_parameters())
        others = [g.read for rank, g in enumerate(self._shared_gradients) if rank != self._rank]
        factors = [replica.read() for replica in self._shared_factors]
        for shard in self._shards:
            shard.reduce(own, others, factors)
