"""One worker's slice of a set of parameters: its gradient is summed, and stepped, by it alone.

The optimiser's work and its state are split over the workers of a node instead of being repeated
by each (the first stage of ZeRO, Rajbhandari et al., SC 2020, with the weights in one place).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from paceline.training.optimizers import make_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.plan.trial import Training
    from paceline.strategies.reduction.flat_layout import FlatLayout, ParameterShard


class OptimizerShard:
    """The parameters' parts that one worker owns.

    weights: the flat array that holds them, float32; shared by all workers, of which each writes
    only its own parts.
    """

    def __init__(
        self, parts: Sequence[ParameterShard], weights: Tensor, training: Training
    ) -> None:
        self.parts = parts
        self._parameters = [
            nn.Parameter(weights[p.offset : p.offset + p.stop - p.start]) for p in parts
        ]
        # A worker owns nothing where there are more workers than lines of parameters.
        self._optimizer = make_optimizer(self._parameters, training) if parts else None

    def reduce(self, gradient_of: Callable[[ParameterShard], Tensor]) -> None:
        """Take the summed gradient of each part, shape (stop - start,)."""
        for parameter, part in zip(self._parameters, self.parts, strict=True):
            parameter.grad = gradient_of(part)

    def gradient_tensors(self) -> list[Tensor]:
        """The reduced gradient of each of `parts`; from `reduce` to `step`, and to be changed in
        place if it is to be summed over nodes as well."""
        found = [parameter.grad for parameter in self._parameters]
        return [gradient for gradient in found if gradient is not None]

    def shapes(self, layout: FlatLayout) -> list[tuple[int, ...]]:
        """Of what the parts are, for those who see them as matrices."""
        return [layout.shape_of(part) for part in self.parts]

    def step(self) -> None:
        """Move the slice's weights by one optimiser step, and let go of the gradients."""
        if self._optimizer is None:
            return
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def put_gradients(self, flat: Tensor) -> None:
        """Copy the reduced gradients to their places in a flat array of the layout."""
        for part, gradient in zip(self.parts, self.gradient_tensors(), strict=True):
            flat[part.offset : part.offset + gradient.numel()] = gradient


def sum_of_shards(
    layout: FlatLayout,
    own: Mapping[str, Tensor],
    others: Sequence[Callable[[ParameterShard], Tensor]],
) -> Callable[[ParameterShard], Tensor]:
    """What sums a part's gradient over the replicas, into `own`, in place.

    own: this worker's gradients by name; one whose strides are not its parameter's is summed in a
    copy. others: of each other replica, what gives a part's gradient, shape (stop - start,).
    """

    def summed(part: ParameterShard) -> Tensor:
        total = shard_of(layout, own, part)
        for other in others:
            total.add_(other(part))
        return total

    return summed


def shard_of(layout: FlatLayout, gradients: Mapping[str, Tensor], part: ParameterShard) -> Tensor:
    """A part of one replica's gradients, shape (stop - start,)."""
    flat = layout.in_storage_order(part.name, gradients[part.name])
    return flat[part.start : part.stop]
