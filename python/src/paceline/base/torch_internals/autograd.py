"""Names of torch's autograd without a stable public interface: nodes of a graph, hooks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

_MEAN, _SUM = 1, 2  # torch's numbers of reductions


def hooks_of(tensor: Tensor) -> Sequence[Any]:
    """Return the hooks of a tensor's gradient."""
    return list((tensor._backward_hooks or {}).values())


def is_scalar(node: Any, place: int) -> bool:
    """Return whether a result of a node's forward function has no dimension."""
    try:
        return len(node._input_metadata[place].shape) == 0
    except (AttributeError, IndexError, RuntimeError):  # a function of the script
        return False


def reduction(node: Any) -> tuple[float, bool | None]:
    """Return how many elements a node makes one number of, and whether it takes their mean.

    None if it takes neither their mean nor their sum. Class weights count as elements.
    """
    kind = node.name()
    if kind.startswith(("MeanBackward", "SumBackward")):
        return float(math.prod(node._saved_self_sym_sizes)), kind.startswith("Mean")
    number = getattr(node, "_saved_reduction", None)
    if number not in (_MEAN, _SUM):
        return 1.0, None
    if kind.startswith("NllLoss"):
        return float(node._saved_total_weight), number == _MEAN
    return float(node._saved_self.numel()), number == _MEAN


def operands(node: Any) -> list[Tensor]:
    """Return the operands that a product keeps for its gradient."""
    names = ("_saved_self", "_saved_mat2", "_saved_other")
    return [kept for name in names if isinstance(kept := getattr(node, name, None), Tensor)]
