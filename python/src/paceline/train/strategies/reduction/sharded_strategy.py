"""Base class of strategies whose workers own shards of one copy of a node's weights."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.collectives.node.shared_node import SharedNode
from paceline.collectives.pass_communication import Total
from paceline.measure.records.communication import StrategyResult
from paceline.train.strategies.reduction.factor_exchange import NodeFactors
from paceline.train.strategies.reduction.flat_layout import FlatLayout, shared_floats
from paceline.train.strategies.reduction.optimizer_shard import OptimizerShard
from paceline.train.strategies.reduction.replicate_group import ReplicateGroup
from paceline.train.training.loss_scale import LOSS_SCALE, LossScale
from paceline.train.training.state import RankState, SavedState, restore_buffers
from paceline.train.training.strategy import LocalStrategy
from paceline.train.training.task import Task


class ShardedStrategy(LocalStrategy):
    """Sums, steps, saves and restores the shards of the workers of this rank."""

    def __init__(self) -> None:
        self._shared: SharedNode | None = None  # None if all workers of a node are in this process
        self._task: Task
        self._layout: FlatLayout  # of the whole model
        self._shards: list[OptimizerShard]  # of the workers of this rank
        self._own_elements = slice(None)  # of the layout, to which these shards belong
        self._total_of_owners: Total | None = None  # None if this rank owns all shards
        self._replicate_group = ReplicateGroup()
        self._node_factors: NodeFactors
        self._saves_shards = True  # False if the ranks of another node save the same
        self._saves_buffers = True  # whether this is the first rank with its layers
        self._scale = LossScale(is_used=False)  # of the gradients

    def _wait_for_node(self) -> None:
        """Wait for the other ranks of the node."""

    def _sum_over_nodes(self) -> None:
        """Sum the shards over the replicate group, except for those computed from factors.

        All nodes have the same shards, hence the same tensors in the same order.
        """
        complete = self._node_factors.parameter_names
        self._replicate_group.all_reduce(
            [tensor for shard in self._shards for tensor in shard.gradient_tensors(complete)],
            [shape for shard in self._shards for shape in shard.shapes(complete)],
        )

    def _squared_norm(self) -> float | None:
        """Return the squared norm of the whole gradient; None if no update depends on it."""
        if self._task.clip_norm is None and not self._scale.is_used:
            return None
        own = sum(shard.squared_norm() for shard in self._shards)
        if self._total_of_owners is None:
            return own
        return float(self._total_of_owners(torch.tensor([own], dtype=torch.float64)))

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients, complete on all ranks of the node."""
        elements = self._layout.elements
        if self._shared is None:
            whole = torch.zeros(elements)
        else:
            whole = shared_floats(self._shared, "the gradients", elements)
        for shard in self._shards:
            shard.copy_gradients_to(whole[self._own_elements])
        self._wait_for_node()
        found = {name: self._layout.view(whole, name) for name in self._layout.names}
        return self._scale.unscaled(found)

    def rank_state(self) -> RankState:
        """Return the shards that this rank updates, unless another node has the same."""
        state = RankState()
        if self._saves_shards:
            for shard in self._shards:
                shard.add_to(state)
            if self._saves_buffers:
                state.add_buffers(self.buffers_of_replicas()[0])
                state.values.update(self._scale.state)
        return state

    def restore(self, saved: SavedState) -> None:
        for shard in self._shards:
            shard.restore(saved)
        for buffers in self.buffers_of_replicas():
            restore_buffers(buffers, saved)
        self._scale.restore(saved.value(LOSS_SCALE))
        self._wait_for_node()

    def describe(self) -> StrategyResult:
        found = self._node_factors.with_traffic(self._replicate_group.describe())
        return {**found, **self._scale.describe()}

    def close(self, *, failed: bool) -> None:
        self._replicate_group.close(failed=failed)
        if self._shared is not None:
            self._shared.close(failed=failed)
