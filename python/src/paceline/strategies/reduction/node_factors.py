"""Sufficient factors between nodes, for strategies whose workers share the weights of a node.

A rank gathers the factors of its workers over its replicate group, before the workers of the node
compute their rows from the factors of all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from paceline.strategies.reduction.factor_choice import (
    ChoiceContext,
    FactorChoice,
    choose,
    setting_of,
    shape_of,
)
from paceline.strategies.reduction.factor_exchange import ExchangedFactors, FactorExchange
from paceline.strategies.reduction.sufficient_factors import linear_layers
from paceline.training.passes import working_dtype

if TYPE_CHECKING:
    from collections.abc import Container

    from torch import Tensor, nn

    from paceline.plan.trial import Trial
    from paceline.strategies.reduction.replicate_group import ReplicateGroup
    from paceline.strategies.reduction.sufficient_factors import SufficientFactors


class NodeFactors(ExchangedFactors):
    """The exchange of one rank over its replicate group. On a single node it does nothing."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._setting = setting_of(trial) if trial.placement.nodes > 1 else "never"
        super().__init__(FactorChoice(setting=self._setting))
        self._ranks = 1  # of the replicate group
        self._owners = self._workers = 1
        self.layers: tuple[str, ...] = ()  # those that send factors
        self.parameter_names: frozenset[str] = frozenset()

    @property
    def may_send(self) -> bool:
        """Return whether the trial allows factors."""
        return self._setting != "never"

    def join(
        self,
        model: nn.Module,
        group: ReplicateGroup,
        *,
        owners: int,
        workers: int = 1,
        own: Container[str] | None = None,
    ) -> None:
        """Choose the layers; collective over all ranks, after `mark_summed_layers`.

        owners: ranks of a node that divide the samples of a layer and the rows of its gradient.
        workers: replicas of this rank, in threads. own: names of the layers that this rank
        computes; None means all. Raises EnvironmentLacks if the nodes would compute different
        gradients.
        """
        if self._setting == "never":
            return
        self._owners, self._workers = owners, workers
        self._ranks = dist.get_world_size(group.group)
        layers = linear_layers(model)
        shapes = {name: shape_of(layer, owners) for name, layer in layers.items()}
        samples = self._samples(self._trial.training.global_batch)
        dtype = working_dtype(self._trial.training)
        self._choice = choose(
            shapes,
            ChoiceContext(
                setting=self._setting,
                samples=samples,
                dtype=dtype,
                gathering=group.group,
                reducing=group.group,
                ranks=self._ranks,
                workers=workers,
            ),
        )
        self.layers = tuple(n for n in self._choice.chosen if own is None or n in own)
        self.parameter_names = frozenset(
            f"{name}.{own}" for name in self.layers for own, _ in layers[name].named_parameters()
        )
        if self.layers:
            chosen = {name: shapes[name] for name in self.layers}
            self._exchange = FactorExchange(chosen, samples, dtype, group.group, workers)

    def rows(self, layer: str, samples: int) -> int:
        """Return how many rows the factors of a layer have if a replica has `samples` samples."""
        return samples * self._ranks if layer in self.layers else samples

    def begin(self, global_samples: int) -> None:
        """Begin a step of so many samples on all ranks."""
        super().begin(self._samples(global_samples))

    def keep_inputs(self, layer: str, inputs: Tensor, worker: int = 0) -> None:
        """Keep the inputs of a forward pass, if the layer sends factors."""
        if layer in self.layers:
            super().keep_inputs(layer, inputs, worker)

    def keep_gradients(self, layer: str, gradients: Tensor, worker: int = 0) -> bool:
        """Keep the gradients of the outputs; return whether the layer sends factors."""
        return layer in self.layers and super().keep_gradients(layer, gradients, worker)

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
