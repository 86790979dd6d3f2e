"""One worker's shard of a set of parameters: only this worker reduces and steps it.

The optimiser's work and state are divided over the workers of a node instead of being repeated by
each (stage 1 of ZeRO, Rajbhandari et al., SC 2020, with one copy of the weights).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.train.strategies.reduction.flat_layout import FlatLayout, ParameterShard
from paceline.train.strategies.reduction.sufficient_factors import (
    LowPrecisionWeights,
    RowGradients,
    SufficientFactors,
)
from paceline.train.training.optimizers import LossScale, TaskOptimizer, no_gradient
from paceline.train.training.state import (
    WEIGHTS,
    RankState,
    SavedState,
    divisible,
    restore_optimizer,
    whole,
)
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


def gradients_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """Return the gradients that parameters have, by name."""
    return {name: p.grad for name, p in parameters if p.grad is not None}


def shard_of(layout: FlatLayout, gradients: Mapping[str, Tensor], shard: ParameterShard) -> Tensor:
    """Return a shard of one replica's gradients, shape (stop - start,).

    It is a view of the gradient, or a copy if the strides differ from those of the parameter.
    """
    if shard.name not in gradients:
        raise no_gradient(shard.name)
    return layout.part(shard, gradients[shard.name])
