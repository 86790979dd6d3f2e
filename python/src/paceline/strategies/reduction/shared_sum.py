"""Sum small vectors over the workers of a node, and over nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from paceline.node.shared_node import SharedNode
    from paceline.strategies.reduction.replicate_group import ReplicateGroup


class SharedSum:
    """The sum of one vector of each worker. All workers get equal bits.

    Workers are threads or processes; all call it the same number of times.
    """

    def __init__(
        self,
        memory: NDArray[np.float64],
        members: Sequence[int],
        own: int,
        wait: Callable[[], None],
        nodes: ReplicateGroup | None = None,
    ) -> None:
        """memory: shape (2 x workers of the node, width), shared. members: the workers whose
        vectors are summed. own: this worker. wait: barrier of the members. nodes: group in which
        the first member sums over nodes as well."""
        self._vectors, self._sums = np.split(memory, 2)
        self._members = list(members)
        self._own = own
        self._wait = wait
        self._nodes = nodes

    def __call__(self, values: Tensor) -> Tensor:
        """Return the sum of `values`, float64, shape (elements,)."""
        elements = len(values)
        first = self._members[0]
        self._vectors[self._own, :elements] = values.numpy()
        self._wait()
        # Nobody still reads the previous sum: all have come to the barrier after that.
        if self._own == first:
            total = self._vectors[self._members, :elements].sum(axis=0)
            if self._nodes is not None:
                self._nodes.sum_vector(torch.from_numpy(total))
            self._sums[first, :elements] = total
        self._wait()
        return torch.from_numpy(self._sums[first, :elements].copy())


def shared_rows(shared: SharedNode, name: str, workers: int, width: int) -> NDArray[np.float64]:
    """Return the memory of a SharedSum, which all processes of the node share; collective."""
    memory = shared.memory(name, 2 * 8 * workers * width)
    return memory.view(np.float64).reshape(2 * workers, width)
