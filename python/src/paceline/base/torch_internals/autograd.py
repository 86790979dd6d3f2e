"""Names of torch's autograd without a stable public interface: nodes of a graph, hooks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

_MEAN, _SUM = 1, 2  # torch's numbers of reductions
_OF_MATRICES = ("MmBackward", "AddmmBackward", "BmmBackward", "LinearBackward")
_REDUCTIONS = (
    *("SumBackward", "MeanBackward", "NormBackward", "LinalgVectorNormBackward"),
    *("VarBackward", "StdBackward", "LogsumexpBackward"),
)
_BOUNDS = ("ClampBackward", "ClampM", "HardtanhBackward", "NanToNumBackward")
_OF_DATA = ("ConvolutionBackward", "CheckpointFunctionBackward")


def hooks_of(tensor: Tensor) -> Sequence[Any]:
    """Return the hooks of a tensor's gradient."""
    return list((tensor._backward_hooks or {}).values())


def is_scalar(node: Any, place: int) -> bool:
    """Return whether a result of a node's forward function has no dimension."""
    return shape(node, place) == ()


def shape(node: Any, place: int) -> tuple[int, ...] | None:
    """Return the shape of a result of a node's forward function; None if it is not known."""
    try:
        return tuple(map(int, node._input_metadata[place].shape))
    except (AttributeError, IndexError, RuntimeError):  # a function of the script
        return None


def is_of_data(node: Any) -> bool:
    """Return whether a node computes with rows of data that need no gradient.

    Products of weights do not, and neither do embeddings of positions, which have no rows.
    """
    if node.name().startswith(_OF_MATRICES):
        return any(each is None for each, _ in node.next_functions)
    if node.name().startswith("EmbeddingBackward"):
        return len(shape(node, 0) or ()) > 2
    return bool(node.name().startswith(_OF_DATA))


def reduced_rows(node: Any) -> int:
    """Return the size of the first dimension if a sum or mean takes it away; 0 otherwise."""
    name, (source, place), result = node.name(), node.next_functions[0], shape(node, 0)
    given = shape(source, place) if source is not None else None
    if not name.startswith(_REDUCTIONS) or result is None or not given:
        return 0
    if len(result) == len(given):
        return given[0] if result[0] == 1 < given[0] else 0
    if not result:
        return given[0]
    dimensions = getattr(node, "_saved_dim", None)
    kept = [dimensions] if isinstance(dimensions, int) else list(dimensions or ())
    # negative ones are kept as unsigned numbers of 64 bits
    return given[0] if any((d - 2**64 if d >= 2**63 else d) % len(given) == 0 for d in kept) else 0


def reduction(node: Any) -> tuple[float, bool | None]:
    """Return how many elements a node makes one number of, and whether it takes their mean.

    None if it takes neither their mean nor their sum. Weights count as elements: those of classes,
    and those by which a sum's elements are multiplied, such as a mask.
    """
    kind = node.name()
    if kind.startswith("SumBackward"):
        return _weights_of_sum(node), False
    if kind.startswith("MeanBackward"):
        return float(math.prod(node._saved_self_sym_sizes)), True
    number = getattr(node, "_saved_reduction", None)
    if number not in (_MEAN, _SUM):
        return 1.0, None
    if kind.startswith("NllLoss"):
        return float(node._saved_total_weight), number == _MEAN
    return float(node._saved_self.numel()), number == _MEAN


def summed_numbers(node: Any) -> float:
    """Return how many numbers a sum has, whatever multiplies them; 0 if the node is none."""
    is_sum = node.name().startswith("SumBackward")
    return float(math.prod(node._saved_self_sym_sizes)) if is_sum else 0.0


def leaves_out(node: Any) -> bool:
    """Return whether a mean counts some elements less than others, such as ignored classes."""
    if not node.name().startswith("NllLoss"):
        return False
    return bool(float(node._saved_total_weight) != node._saved_target.numel())


def lets_through(node: Any) -> bool:
    """Return whether a number is the same behind a node, as one that is within its bounds.

    A mean of such numbers is within them, too. Nodes of other numbers: False.
    """
    name = node.name()
    if name.startswith("WhereBackward"):
        condition, is_first = node._saved_condition, node.next_functions[0][0] is not None
        return bool(condition.numel() == 1) and bool(condition) == is_first
    if name.startswith("ReluBackward"):
        result = node._saved_result
        return bool(result.numel() == 1) and bool(result > 0)
    if not name.startswith(_BOUNDS) or node._saved_self.numel() != 1:
        return False
    number = float(node._saved_self.item())
    return _bound(node, "min", -math.inf) < number < _bound(node, "max", math.inf)


def _bound(node: Any, name: str, without: float) -> float:
    values = (getattr(node, f"_saved_{name}{end}", None) for end in ("", "_val"))
    return next((float(each) for each in values if each is not None), without)


def _weights_of_sum(node: Any) -> float:
    """Return the number of a sum's elements, or the sum of the constants that multiply them."""
    elements = float(math.prod(node._saved_self_sym_sizes))
    product = node.next_functions[0][0]
    if product is None or not product.name().startswith("MulBackward"):
        return elements
    weights = [each for each in operands(product) if each.numel() > 1 and not each.requires_grad]
    if len(weights) != 1 or sum(each is not None for each, _ in product.next_functions) != 1:
        return elements
    [constant] = weights  # broadcast over the elements
    return float(constant.detach().double().sum()) * elements / constant.numel()


def operands(node: Any) -> list[Tensor]:
    """Return the operands that a product keeps for its gradient."""
    names = ("_saved_self", "_saved_mat2", "_saved_other")
    return [kept for name in names if isinstance(kept := getattr(node, name, None), Tensor)]
