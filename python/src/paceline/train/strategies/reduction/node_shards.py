"""Shards of one copy of a node's weights: only the worker that owns one reduces and steps it.

The optimiser's work and state are divided over the workers of a node instead of being repeated by
each (stage 1 of ZeRO, Rajbhandari et al., SC 2020, with one copy of the weights).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.collectives.node.shared_node import SharedNode
from paceline.collectives.recorder import PassCommunication, Total, awaiting
from paceline.measure.records.communication import StrategyResult
from paceline.train.strategies.reduction.factor_exchange import NodeFactors
from paceline.train.strategies.reduction.flat_layout import (
    FlatLayout,
    ParameterShard,
    shared_floats,
)
from paceline.train.strategies.reduction.replicate_group import ReplicateGroup, traffic_of
from paceline.train.strategies.reduction.sufficient_factors import (
    LowPrecisionWeights,
    RowGradients,
    SufficientFactors,
)
from paceline.train.training.optimizers import LOSS_SCALE, LossScale, TaskOptimizer, no_gradient
from paceline.train.training.state import (
    WEIGHTS,
    RankState,
    SavedState,
    divisible,
    restore_buffers,
    restore_optimizer,
    whole,
)
from paceline.train.training.strategy import LocalStrategy
from paceline.train.training.task import Task


class OptimizerShard:
    """The parameter shards that one worker owns, their gradients and their optimiser.

    layout: of the parameters. weights: flat float32 array of the elements from `first` on, which
    holds the shards. Several workers may share it, and each writes only its own shards. task: None
    if another node steps them, and this worker only exchanges their gradients and weights. rows:
    parameters of linear layers whose gradients are computed from sufficient factors, with their
    numbers of rows. low_precision: copy of the weights of those layers, which all workers share,
    too. scale: of the gradients, under fp16.
    """

    def __init__(  # noqa: PLR0913  (most workers lack the last four)
        self,
        layout: FlatLayout,
        parameter_shards: Sequence[ParameterShard],
        weights: Tensor,
        task: Task | None,
        rows: Mapping[str, int] | None = None,
        low_precision: LowPrecisionWeights | None = None,
        *,
        first: int = 0,
        scale: LossScale | None = None,
    ) -> None:
        self.parameter_shards = parameter_shards
        self._row_gradients = RowGradients(layout, parameter_shards, rows or {})
        self._low_precision = low_precision
        self._layout = layout
        self._places = [
            slice(s.place.start - first, s.place.stop - first) for s in parameter_shards
        ]
        self._parameters = [nn.Parameter(weights[place]) for place in self._places]
        # A worker owns nothing if there are more workers than cache lines of parameters.
        names = [shard.name for shard in parameter_shards]
        named = zip(names, self._parameters, strict=True)
        self._optimizer: TaskOptimizer | None = None
        if task is not None and names:
            self._optimizer = TaskOptimizer(task, named, scale)

    @property
    def elements(self) -> int:
        """Return the number of elements of all shards."""
        return sum(shard.elements for shard in self.parameter_shards)

    def reduce(
        self,
        own: Mapping[str, Tensor],
        others: Sequence[Callable[[ParameterShard], Tensor]],
        factors: Sequence[SufficientFactors] = (),
    ) -> None:
        """Sum the gradients of each shard over the replicas, or compute them from the factors.

        own: gradients of this worker's replica by parameter; they become the sums. others: for each
        other replica, a function that returns its gradient of a shard, shape (stop - start,).
        factors: those of every replica, in the same order on all workers.
        """
        for shard, parameter in zip(self.parameter_shards, self._parameters, strict=True):
            total = self._row_gradients.compute(shard, factors)
            if total is None:
                total = shard_of(self._layout, own, shard)
                for gradient_of in others:
                    total.add_(gradient_of(shard))
            parameter.grad = total

    def set_gradients(self, flat: Tensor) -> None:
        """Use views of `flat`, which has the shape of the weights, as reduced gradients."""
        for place, parameter in zip(self._places, self._parameters, strict=True):
            parameter.grad = flat[place]

    def weights(self) -> list[Tensor]:
        """Return the weights; change them in place to replace them."""
        return [parameter.detach() for parameter in self._parameters]

    def gradient_tensors(self, skip: Container[str] = ()) -> list[Tensor]:
        """Return the reduced gradients; change them in place to sum them over nodes.

        skip: names of parameters to leave out.
        """
        shards = zip(self.parameter_shards, self._parameters, strict=True)
        found = [parameter.grad for shard, parameter in shards if shard.name not in skip]
        return [gradient for gradient in found if gradient is not None]

    def shapes(self, skip: Container[str] = ()) -> list[tuple[int, ...]]:
        """Return the shape of each shard as a matrix where it has whole rows, in the same order."""
        return [self._layout.shape_of(s) for s in self.parameter_shards if s.name not in skip]

    def squared_norm(self) -> float:
        """Return the squared L2 norm of the gradients of these shards."""
        return 0.0 if self._optimizer is None else self._optimizer.squared_norm()

    def step(self, squared_norm: float | None = None) -> None:
        """Take one optimiser step, and release the gradients.

        squared_norm: of the gradient of the whole model; needed if the task clips gradients.
        """
        if self._optimizer is not None:
            self._optimizer.step(squared_norm)
            self.refresh()
        for parameter in self._parameters:
            parameter.grad = None

    def step_part(self, share: float) -> None:
        """Step with the mean gradient of a part of a batch; see `TaskOptimizer.step_part`."""
        if self._optimizer is not None:
            self._optimizer.step_part(share)
        for parameter in self._parameters:
            parameter.grad = None

    def refresh(self) -> None:
        """Update this worker's part of the weights in lower precision."""
        if self._low_precision is not None:
            self._low_precision.refresh(self.parameter_shards)

    def add_to(self, state: RankState) -> None:
        """Add weights and optimiser state of these shards, if this worker steps them."""
        if self._optimizer is None:
            return
        shards = {shard.name: shard for shard in self.parameter_shards}
        for shard, parameter in zip(self.parameter_shards, self._parameters, strict=True):
            own = self._layout.elements_of(shard, parameter)
            state.tensors.append(replace(own, name=f"{WEIGHTS}/{own.name}"))
        state.add_optimizer(
            self._optimizer, lambda name, values: self._layout.elements_of(shards[name], values)
        )

    @torch.no_grad()
    def restore(self, saved: SavedState) -> None:
        """Set the weights of these shards and their optimiser's state.

        Raises DataError if the state is of another model.
        """
        shards = {shard.name: shard for shard in self.parameter_shards}
        for shard, parameter in zip(self.parameter_shards, self._parameters, strict=True):
            name = f"{WEIGHTS}/{shard.name}"
            tensor = whole(saved, name, self._layout.shape(shard.name))
            parameter.copy_(self._layout.part(shard, tensor))

        def part_of(name: str, tensor: Tensor) -> Tensor:
            tensor = divisible(name, tensor, self._layout.shape(name))
            return self._layout.part(shards[name], tensor)

        if self._optimizer is not None:
            restore_optimizer(self._optimizer, saved, part_of)
        self.refresh()

    def copy_gradients_to(self, flat: Tensor) -> None:
        """Copy the gradients to their places in a flat array of the layout."""
        for shard, gradient in zip(self.parameter_shards, self.gradient_tensors(), strict=True):
            flat[shard.place] = gradient


def shard_of(layout: FlatLayout, gradients: Mapping[str, Tensor], shard: ParameterShard) -> Tensor:
    """Return a shard of one replica's gradients, shape (stop - start,).

    It is a view of the gradient, or a copy if the strides differ from those of the parameter.
    """
    if shard.name not in gradients:
        raise no_gradient(shard.name)
    return layout.part(shard, gradients[shard.name])


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


# --- exchange shards between nodes, so that each node steps a part of them (ZeRO-1) --------------
#
# Stage 1 of ZeRO (Rajbhandari et al., SC 2020) over the ranks of all nodes. What one rank of a node
# sums is divided into shards, one for each rank of its replicate group. A step is
#
#     reduce-scatter: each rank sums the gradients of its own shard over the group
#     optimiser step of its own shard
#     all-gather: each rank takes the weights of the other shards
#
# The reduce-scatter is an all-to-all and a sum in the order of the ranks, because the one of Gloo
# is an all-reduce, which sends twice the bytes (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).
# The all-gather is an all-to-all of equal rows, because the one of Gloo allocates a copy of its
# output for each message. Holes between these blocks kept up to 13 of them (AlexNet, 27 messages):
# as much memory as the divided state of the optimiser saves.


class ZeroExchange:
    """Reduce-scatter and all-gather of the shards of a replicate group, in messages that need
    little memory.

    A message has a row for each shard; rows of shorter shards have an unused end.
    """

    def __init__(
        self, shards: Sequence[OptimizerShard], group: dist.ProcessGroup | None, message_mb: float
    ) -> None:
        """shards: by rank of the group; each rank steps its own. message_mb: of all rows."""
        self.communication = PassCommunication()  # operations without the copies around them
        self._shards, self._group = shards, group
        self._own = shards[dist.get_rank(group)]
        longest = max(shard.elements for shard in shards)
        row = max(1, min(longest, int(message_mb * 2**20) // (4 * len(shards))))
        self._bounds = [(start, min(start + row, longest)) for start in range(0, longest, row)]
        self._sent, self._received = torch.zeros(2, len(shards) * row)

    def reduce_scatter(self) -> None:
        """Sum the gradients of the own shard over the group, in place."""
        for start, stop in self._bounds:
            sent, received = self._message(start, stop)
            for shard, row in zip(self._shards, self._rows(sent), strict=True):
                for part, place in _places(shard.gradient_tensors(), row, start):
                    place.copy_(part)
            self._exchange(received, sent)
            total = received.view(len(self._shards), -1).sum(0)
            for part, place in _places(self._own.gradient_tensors(), total, start):
                part.copy_(place)

    def all_gather(self, tensors_of: Callable[[OptimizerShard], Sequence[Tensor]]) -> None:
        """Replace the tensors of the other shards by those of the ranks that step them.

        tensors_of: returns weights or gradients of a shard.
        """
        for start, stop in self._bounds:
            sent, received = self._message(start, stop)
            own, *copies = self._rows(sent)
            for part, place in _places(tensors_of(self._own), own, start):
                place.copy_(part)
            for copy in copies:
                copy.copy_(own)
            self._exchange(received, sent)
            for shard, row in zip(self._shards, self._rows(received), strict=True):
                if shard is not self._own:
                    for part, place in _places(tensors_of(shard), row, start):
                        part.copy_(place)

    def sum_vector(self, values: Tensor) -> None:
        """Sum a small vector in place over the group."""
        with self.communication.measured():
            dist.all_reduce(values, group=self._group)

    def describe(self) -> StrategyResult:
        """Return sizes and traffic: both operations together send what one all-reduce does."""
        sizes = [4 * len(self._shards) * (stop - start) for start, stop in self._bounds]
        return traffic_of(sizes, len(self._shards))

    def _message(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return what is sent and received of the elements from `start` to `stop` of each shard."""
        elements = len(self._shards) * (stop - start)
        return self._sent[:elements], self._received[:elements]

    def _exchange(self, received: Tensor, sent: Tensor) -> None:
        """Send a row to each rank. The time until this thread runs again is no communication: it
        adds up over many messages where cores are shared."""
        ended_s: list[float] = []
        began_s = time.perf_counter()
        with awaiting():
            work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)
        assert work is not None, "this rank is in the group"
        work.get_future().add_done_callback(lambda _: ended_s.append(time.perf_counter()))
        work.wait()
        ended_s.append(time.perf_counter())
        self.communication.total_s += ended_s[0] - began_s

    def _rows(self, message: Tensor) -> Sequence[Tensor]:
        return message.view(len(self._shards), -1).unbind()


def _places(tensors: Iterable[Tensor], row: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of tensors with their places in `row`.

    tensors: shape (elements,) each; one after the other. row: their elements from `start` on.
    """
    offset = -start
    for tensor in tensors:
        low, high = max(offset, 0), min(offset + len(tensor), len(row))
        if low < high:
            yield tensor[low - offset : high - offset], row[low:high]
        offset += len(tensor)
