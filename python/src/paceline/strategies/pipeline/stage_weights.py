"""Weights of one pipeline stage: their memory, and their synchronisation among replicas of the
stage."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.strategies.reduction.flat_layout import copy_shards
from paceline.strategies.reduction.optimizer_shard import OptimizerShard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.node.signals import Barrier
    from paceline.strategies.reduction.flat_layout import FlatLayout, ParameterShard
    from paceline.strategies.reduction.shared_gradients import SharedGradients
    from paceline.training.task import Task


@dataclass(frozen=True, slots=True)
class StageReplicas:
    """The workers of a node with the same stage, seen from one of them."""

    own: int  # index of this worker's replica
    shards: Sequence[Sequence[ParameterShard]]  # shards of the stage's parameters by replica
    shared_gradients: Sequence[SharedGradients]  # by replica; [] if there is only one
    barrier: Barrier

    def synchronise(self) -> None:
        """Wait for the other replicas of the stage."""
        if len(self.shards) > 1:
            self.barrier.wait()


class StageWeights:
    """One replica's view of a stage's weights; it owns some shards of them.

    On the CPU all replicas compute on shared memory. On a GPU a worker has a copy of its own: it
    copies stepped shards into the shared memory, and takes the shards of others from there.

    shard: the parameter shards that this worker owns, their gradients and optimiser.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Mapping[str, nn.Parameter],
        shared: Tensor,
        replicas: StageReplicas,
        *,
        task: Task,
        device: torch.device | None,
    ) -> None:
        """layout: layout of the stage alone. parameters: the stage's parameters, equal on all
        replicas; their memory moves. shared: the stage's part of the node's weights, shape
        (layout.elements,). device: device of a separate copy; None for no copy."""
        self._layout = layout
        self._parameters = parameters
        self._shared = shared
        self._replicas = replicas
        self._has_copy = device is not None
        self._weights = torch.empty(layout.elements, device=device) if self._has_copy else shared
        layout.bind(parameters, self._weights, copy=self._has_copy or replicas.own == 0)
        own_shards = replicas.shards[replicas.own]
        self.shard = OptimizerShard(layout, own_shards, self._weights, task)

    def reduce(self) -> None:
        """Sum this worker's shards of the gradients over the replicas of the node."""
        own = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        others = list(self._replicas.shared_gradients)
        if others:
            mine = others.pop(self._replicas.own)
            for name, gradient in own.items():
                mine.write(name, gradient)
        self._replicas.synchronise()
        self.shard.reduce(own, [partial(self._gradient_of, replica) for replica in others])

    def step(self, squared_norm: float | None = None) -> None:
        """Step the optimiser; afterwards all replicas have the new weights.

        squared_norm: of the gradient of the whole model; needed if the task clips gradients.
        """
        self.shard.step(squared_norm)
        self.exchange()

    @property
    def elements(self) -> int:
        """Elements of the stage's weights."""
        return self._layout.elements

    def exchange(self) -> None:
        """Give the other replicas of the stage the shards of this one, and take theirs."""
        if len(self._replicas.shards) == 1:
            return
        self.publish()
        self._replicas.synchronise()
        for replica, shards in enumerate(self._replicas.shards):
            if self._has_copy and replica != self._replicas.own:
                copy_shards(shards, self._shared, self._weights)

    def step_part(self, share: float) -> None:
        """Update with the gradient of a part of a batch; of a single replica without a copy.

        share: samples of the part / samples of the batch, over whose samples the loss is a mean.
        """
        self.reduce()
        for gradient in self.shard.gradient_tensors():
            gradient.div_(share)
        self.shard.step_part(share)

    def stash(self) -> WeightStash:
        """Return the copies of these weights for micro-batches in flight."""
        return WeightStash(self._layout, self._parameters, self._weights)

    def publish(self) -> None:
        """Copy this worker's shards of the weights into the shared memory, if it has a copy of its
        own."""
        if self._has_copy:
            copy_shards(self.shard.parameter_shards, self._weights, self._shared)

    def _gradient_of(self, replica: SharedGradients, shard: ParameterShard) -> Tensor:
        return replica.read(shard).to(self._weights.device)


class WeightStash:
    """Copies of a stage's weights for micro-batches in flight.

    A copy is necessary: autograd keeps views of the weights, which must not change until the
    backward pass.
    """

    def __init__(
        self, layout: FlatLayout, parameters: Mapping[str, nn.Parameter], weights: Tensor
    ) -> None:
        """weights: of the stage, flat; they are changed by updates in place."""
        self._layout, self._parameters, self._weights = layout, parameters, weights
        self._copies: dict[int, Tensor] = {}
        self._in_flight: Counter[int] = Counter()
        self._free: list[Tensor] = []
        self.version = 0  # number of updates
        self.most_copies = 0

    def begin(self, version: int) -> None:
        """Use these weights for a forward pass; they are kept until `end`."""
        self._in_flight[version] += 1
        self.keep(version)
        self.use(version)

    def keep(self, version: int) -> None:
        """Copy the current weights, unless this version was copied before."""
        if version in self._copies:
            return
        assert version == self.version, "an older version was kept while it was the current one"
        copy = self._free.pop() if self._free else torch.empty_like(self._weights)
        self._copies[version] = copy.copy_(self._weights)
        self.most_copies = max(self.most_copies, len(self._copies))

    def use(self, version: int) -> None:
        """Let the stage's parameters be views of a version that is kept."""
        self._layout.bind(self._parameters, self._copies[version], copy=False)

    def use_current(self) -> None:
        """Let the stage's parameters be the current weights; updates change them."""
        self._layout.bind(self._parameters, self._weights, copy=False)

    def end(self, version: int, oldest_needed: int) -> None:
        """Release a version after its backward pass, and all others before `oldest_needed`."""
        self._in_flight[version] -= 1
        for each in [v for v in self._copies if v < oldest_needed and not self._in_flight[v]]:
            self._free.append(self._copies.pop(each))
