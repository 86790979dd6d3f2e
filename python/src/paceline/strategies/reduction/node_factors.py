"""Sufficient factors between nodes, for strategies whose workers share the weights of a node.

A rank gathers the factors of its workers over its replicate group, before the workers of the node
compute their rows from the factors of all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from paceline.strategies.reduction.factor_choice import ChoiceContext, setting_of, shape_of
from paceline.strategies.reduction.factor_exchange import FactorExchange
from paceline.strategies.reduction.factor_layers import parameter_names
from paceline.training.passes import working_dtype

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from torch import nn

    from paceline.plan.trial import Trial
    from paceline.strategies.reduction.replicate_group import ReplicateGroup
    from paceline.strategies.reduction.sufficient_factors import SufficientFactors


class NodeFactors(FactorExchange):
    """The exchange of one rank over its replicate group. On a single node it does nothing."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(setting_of(trial) if trial.placement.nodes > 1 else "never")
        self._training = trial.training
        self._owners = self._workers = 1
        self.parameter_names: frozenset[str] = frozenset()

    @property
    def may_send(self) -> bool:
        """Return whether the trial allows factors."""
        return self.choice.setting != "never"

    def join(
        self,
        layers: Mapping[str, nn.Linear],
        group: ReplicateGroup,
        *,
        owners: int,
        workers: int = 1,
        own: Container[str] | None = None,
    ) -> None:
        """Choose among the layers that have factors; collective over all ranks.

        owners: ranks of a node that divide the samples of a layer and the rows of its gradient.
        workers: replicas of this rank, in threads. own: names of the layers that this rank
        computes; None means all. Raises EnvironmentLacks if the nodes would compute different
        gradients.
        """
        if not self.may_send:
            return
        self._owners, self._workers = owners, workers
        self._ranks = dist.get_world_size(group.group)
        context = ChoiceContext(
            setting=self.choice.setting,
            samples=self._samples(self._training.global_batch),
            dtype=working_dtype(self._training),
            gathering=group.group,
            reducing=group.group,
            ranks=self._ranks,
            workers=workers,
        )
        self.choose({n: shape_of(layer, owners) for n, layer in layers.items()}, context, own)
        self.parameter_names = parameter_names((name, layers[name]) for name in self.layers)

    def rows(self, layer: str, samples: int) -> int:
        """Return how many rows the factors of a layer have if a replica has `samples` samples."""
        return samples * self._ranks if layer in self.layers else samples

    def begin(self, global_samples: int) -> None:
        """Begin a step of so many samples on all ranks."""
        super().begin(self._samples(global_samples))

    def gathered(self) -> SufficientFactors:
        """Return the factors of all nodes, after the passes of all workers; blocks until they have
        arrived."""
        return {layer: self.wait(layer) for layer in reversed(self.layers)}

    def _samples(self, global_samples: int) -> int:
        """Return the largest number of rows of a rank.

        A worker without a sample may pass one that does not count.
        """
        replicas = self._ranks * self._owners * self._workers
        return -(-global_samples // replicas) * self._workers
