"""Parameters that several stages use: tied weights, such as those of an embedding and an output.

The first stage that uses a parameter owns it: it sums its gradient and steps it. The other stages
compute on the same shared memory, and hand their gradients to the owner. A stage reads new weights
in its next forward pass, which needs the output of the owner's, so no further barrier is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.strategies.reduction.flat_layout import shared_floats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from paceline.node.shared_node import SharedNode
    from paceline.strategies.pipeline.split_points import Layers


@dataclass(frozen=True, slots=True)
class Ownership:
    """Names of the trained parameters by stage, each under its first name in the model."""

    owned: list[list[str]]
    borrowed: list[list[str]]  # owned by an earlier stage

    @classmethod
    def of(cls, model: nn.Module, stages: Sequence[Layers]) -> Ownership:
        names = {id(p): name for name, p in model.named_parameters()}
        taken: set[str] = set()
        owned: list[list[str]] = []
        borrowed: list[list[str]] = []
        for layers in stages:
            parameters = (p for _, layer in layers for p in layer.parameters() if p.requires_grad)
            used = dict.fromkeys(names[id(p)] for p in parameters)
            owned.append([name for name in used if name not in taken])
            borrowed.append([name for name in used if name in taken])
            taken.update(used)
        return cls(owned, borrowed)

    @property
    def has_ties(self) -> bool:
        """Return whether several stages use a parameter."""
        return any(self.borrowed)


class TiedGradients:
    """Gradients of borrowed parameters, in memory that the owner reads."""

    def __init__(
        self,
        shared: SharedNode,
        ownership: Ownership,
        parameters: Mapping[str, nn.Parameter],
        *,
        replica: int,
        replicas: int,
        stage: int,
    ) -> None:
        """parameters: of the whole model, still with their shapes. Collective over the node."""
        self._parameters = parameters
        self._lent: list[tuple[str, Tensor]] = []  # gradients that others compute for this stage
        self._borrowed: list[tuple[str, Tensor]] = []
        for of_replica in range(replicas):
            for user, names in enumerate(ownership.borrowed):
                for name in names:
                    parameter = parameters[name]
                    memory = shared_floats(shared, "tied gradients", parameter.numel())
                    gradient = memory.as_strided(parameter.shape, parameter.stride())
                    if of_replica != replica:
                        continue
                    if user == stage:
                        self._borrowed.append((name, gradient))
                    elif name in ownership.owned[stage]:
                        self._lent.append((name, gradient))

    def publish(self) -> None:
        """Copy the gradients of borrowed parameters; call it before the barrier of all stages."""
        for name, gradient in self._borrowed:
            own = self._parameters[name].grad
            if own is None:
                gradient.zero_()
            else:
                gradient.copy_(own)

    def collect(self) -> None:
        """Add the gradients that other stages have published to those of this stage."""
        for name, gradient in self._lent:
            own = self._parameters[name].grad
            assert own is not None, "a stage sets the gradients of all of its parameters"
            own.add_(gradient)
