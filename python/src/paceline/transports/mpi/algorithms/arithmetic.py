"""Reductions whose result is the same bits wherever they are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def reduce_in_order(
    own: NDArray[Any], rank: int, others: dict[int, NDArray[Any]], ufunc: np.ufunc
) -> None:
    """Reduce what the ranks contribute, in their order, into `own`; may overwrite `others`.

    The order makes the result the same bits wherever it is computed.
    """
    contributions = {**others, rank: own}
    first, *rest = sorted(contributions)
    result = contributions[first]
    for contributor in rest:
        contribution = contributions[contributor]
        # The own elements must not be overwritten before their turn.
        target = own if contribution is own or result is own else result
        ufunc(result, contribution, out=target)
        result = target
