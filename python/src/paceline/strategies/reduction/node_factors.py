"""Sufficient factors between nodes, for strategies whose workers share the weights of a node.

A rank gathers the factors of its workers over its replicate group, before the workers of the node
compute their rows from the factors of all of them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from paceline.strategies.reduction.factor_choice import (
    ChoiceContext,
    FactorChoice,
    choose,
    setting_of,
    shape_of,
)
from paceline.strategies.reduction.factor_exchange import FactorExchange
from paceline.strategies.reduction.sufficient_factors import linear_layers
from paceline.training.passes import working_dtype

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from torch import Tensor, nn

    from paceline.plan.trial import Trial
    from paceline.strategies.reduction.replicate_group import ReplicateGroup
    from paceline.strategies.reduction.sufficient_factors import SufficientFactors


class NodeFactors:
    """The exchange of one rank over its replicate group. On a single node it does nothing."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._setting = setting_of(trial) if trial.placement.nodes > 1 else "never"
        self._choice = FactorChoice(setting=self._setting)
        self._exchange: FactorExchange | None = None
        self._ranks = 1  # of the replicate group
        self._owners = self._workers = 1
        self._incomplete: set[int] = set()  # workers that have passes to come
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
        if self._exchange is not None:
            self._exchange.begin(self._samples(global_samples))

    @contextmanager
    def accumulating(self, worker: int = 0) -> Iterator[None]:
        """Send nothing meanwhile, because a later pass has more samples of the step."""
        self._incomplete.add(worker)
        yield
        self._incomplete.discard(worker)

    def keep_inputs(self, layer: str, inputs: Tensor, worker: int = 0) -> None:
        """Keep the inputs of a forward pass, if the layer sends factors."""
        if self._exchange is not None and layer in self.layers:
            is_last = worker not in self._incomplete
            self._exchange.keep_inputs(layer, inputs, worker, is_last=is_last)

    def keep_gradients(self, layer: str, gradients: Tensor, worker: int = 0) -> bool:
        """Keep the gradients of the outputs; return whether the layer sends factors."""
        if self._exchange is None or layer not in self.layers:
            return False
        is_last = worker not in self._incomplete
        self._exchange.keep_gradients(layer, gradients, worker, is_last=is_last)
        return True

    def wait(self, layer: str) -> tuple[Tensor, Tensor]:
        """Return the factors of one layer of all nodes; blocks until they have arrived."""
        assert self._exchange is not None, "the layer sends factors"
        return self._exchange.wait(layer)

    def gathered(self) -> SufficientFactors:
        """Return the factors of all nodes, after the passes of all workers; blocks until they have
        arrived."""
        if self._exchange is None:
            return {}
        return {layer: self._exchange.wait(layer) for layer in reversed(self.layers)}

    def with_traffic(self, others: dict[str, Any]) -> dict[str, Any]:
        """Add the choice and the traffic of factors to the description of other gradients."""
        sent = None if self._exchange is None else self._exchange.sent_bytes
        return self._choice.with_traffic(others, sent)

    def _samples(self, global_samples: int) -> int:
        """Return the largest number of rows of a rank.

        A worker without a sample may pass one that does not count.
        """
        replicas = self._ranks * self._owners * self._workers
        return -(-global_samples // replicas) * self._workers
