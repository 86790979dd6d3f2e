"""The weights of one stage: where a worker computes on them, how its replicas keep in step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.strategies.reduction.optimizer_shard import OptimizerShard, sum_of_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.plan.trial import Training
    from paceline.strategies.reduction.flat_layout import FlatLayout, ParameterShard
    from paceline.strategies.reduction.shared_gradients import SharedGradients
    from paceline.transports.shared.barrier import Barrier


@dataclass(frozen=True, slots=True)
class StageReplicas:
    """The workers of a node that have the same stage, as one of them sees them."""

    own: int  # this worker's replica
    shares: Sequence[Sequence[ParameterShard]]  # what each owns of the stage's parameters
    shared_gradients: Sequence[SharedGradients]  # of all replicas; [] if there is but one
    barrier: Barrier

    def synchronise(self) -> None:
        if len(self.shares) > 1:
            self.barrier.wait()


class StageWeights:
    """What one replica of a stage has of the stage's weights; it owns a slice of them.

    With `apart` False all replicas compute on the memory that they share. A GPU cannot: its worker
    has a copy apart, puts what it has stepped into the shared memory, and takes the others' slices
    from there.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Mapping[str, nn.Parameter],
        shared: Tensor,
        replicas: StageReplicas,
        training: Training,
        device: torch.device | None,
    ) -> None:
        """layout: of the stage alone. parameters: the stage's, with the same weights on all
        replicas; they move. shared: the stage's part of the node's weights, shape
        (layout.elements,). device: where a copy apart lies; None for none.
        """
        self._layout = layout
        self._parameters = parameters
        self._shared = shared
        self._replicas = replicas
        self._apart = device is not None
        self._weights = torch.empty(layout.elements, device=device) if self._apart else shared
        layout.bind(parameters, self._weights, copy=self._apart or replicas.own == 0)
        self._shard = OptimizerShard(replicas.shares[replicas.own], self._weights, training)

    def reduce(self) -> None:
        """Sum this worker's slice of the gradients over the replicas of the node."""
        own = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        if self._replicas.shared_gradients:
            gradients_of_replica = self._replicas.shared_gradients[self._replicas.own]
            for name, gradient in own.items():
                gradients_of_replica.put(name, gradient)
        self._replicas.synchronise()
        others = [
            self._reader(gradients_of_replica)
            for replica, gradients_of_replica in enumerate(self._replicas.shared_gradients)
            if replica != self._replicas.own
        ]
        self._shard.reduce(sum_of_shards(self._layout, own, others))

    def reduced(self) -> list[Tensor]:
        """The slice's gradients, flat, to be changed in place; from `reduce` to `step`."""
        return self._shard.gradient_tensors()

    def reduced_shapes(self) -> list[tuple[int, ...]]:
        """Of those: rows of matrices where they are."""
        return self._shard.shapes(self._layout)

    def step(self) -> None:
        """Step the optimiser; afterwards no replica's weights are stale."""
        self._shard.step()
        if len(self._replicas.shares) == 1:
            return
        self.publish()
        self._replicas.synchronise()
        for replica, parts in enumerate(self._replicas.shares):
            if self._apart and replica != self._replicas.own:
                _copy(parts, self._shared, self._weights)

    def publish(self) -> None:
        """Put this worker's slice of the weights into the shared memory, if it is not there."""
        if self._apart:
            _copy(self._shard.parts, self._weights, self._shared)

    def put_gradients(self, flat: Tensor) -> None:
        """Put the slice's gradients into an array of the stage's layout."""
        self._shard.put_gradients(flat)

    def _reader(self, gradients_of_replica: SharedGradients) -> Callable[[ParameterShard], Tensor]:
        return lambda part: gradients_of_replica.read(part).to(self._weights.device)


def _copy(parts: Sequence[ParameterShard], source: Tensor, target: Tensor) -> None:
    """The same elements from one flat array to another."""
    for part in parts:
        place = slice(part.offset, part.offset + part.stop - part.start)
        target[place].copy_(source[place])
