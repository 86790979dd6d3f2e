"""A replica that updates its weights by itself; they lie in one flat array."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from paceline.base.errors import TimedOut
from paceline.train.strategies.reduction.flat_layout import FlatLayout
from paceline.train.strategies.reduction.node_shards import gradients_of
from paceline.train.training.batch_norm import normalise_alone
from paceline.train.training.optimizers import TaskOptimizer, no_gradient, trained_parameters


def too_slow(kind: str, rank: int, slow: Iterable[int], step: int, limit_s: float) -> TimedOut:
    """Return the error about ranks that do not finish a step. kind: "rank" or "local rank"."""
    names = ", ".join(map(str, slow))
    return TimedOut(
        f"{kind} {rank}: waited {limit_s:g} s (limits.collective_s) for {kind} {names} to finish "
        f"step {step}; no rank made progress. Look at the logs of these ranks; if they only need "
        "more time, increase limits.collective_s in the spec"
    )


class FlatReplica:
    """A model whose trained parameters are views of `weights`.

    weights: shape (elements,), float32, every parameter in storage order from a multiple of 64
    bytes, zeros between. Changing it changes the model. Running statistics of batch normalisation
    are those of this replica, and lie elsewhere.
    """

    def __init__(
        self, model: nn.Module, memory: Callable[[int], Tensor] = torch.zeros, *, copy: bool = True
    ) -> None:
        """memory: returns an array of so many elements. copy: put the weights of the model there;
        otherwise it has them already, or another replica puts them there."""
        normalise_alone(model)
        self.model = model
        self.parameters = trained_parameters(model)
        self.layout = FlatLayout.of(self.parameters.items())
        self.weights = memory(self.layout.elements)
        self.layout.bind(self.parameters, self.weights, copy=copy)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parts of an array like `weights` by the names of the parameters."""
        return {name: self.layout.view(flat, name) for name in self.layout.names}

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by the model's own names, between a backward pass and a step."""
        return gradients_of(self.parameters.items())

    def require_gradients(self) -> None:
        """Raise UsageError if a parameter has no gradient after a backward pass."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                raise no_gradient(name)

    def state_dict(self, weights: Tensor | None = None) -> dict[str, Tensor]:
        """Return the state of the model; weights: others in an array like its own."""
        if weights is None:
            return dict(self.model.state_dict())
        self.layout.bind(self.parameters, weights, copy=False)  # also tied ones, of several names
        state = dict(self.model.state_dict())
        self.layout.bind(self.parameters, self.weights, copy=False)
        return state

    def step_part(self, optimizer: TaskOptimizer, share: float) -> None:
        """Step with the gradients of a part of a batch, whose loss is a mean over the batch.

        share: samples of the part / samples of the batch; other replicas have the rest.
        """
        if share:
            for gradient in self.gradients().values():
                gradient.div_(share)
        optimizer.step_part(share, progress=1.0)
