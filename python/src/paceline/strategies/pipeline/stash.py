"""Copies of a stage's weights for the micro-batches in flight of a pipeline without flushes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.strategies.reduction.flat_layout import FlatLayout


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
