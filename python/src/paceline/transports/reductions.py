"""Reductions: torch's operations as numpy arithmetic on flat memory of the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from paceline.torch_internals import factor_of
from paceline.transports.buffers import flattened, on_host, wire_buffer

_ReduceOp: Any = dist.ReduceOp  # its members are of another type than the options' values

# torch's reduction, its arithmetic, and that on 0 and 1 for booleans (a sum is true if any value
# is).
_OPERATIONS: tuple[tuple[Any, np.ufunc, np.ufunc | None], ...] = (
    (_ReduceOp.SUM, np.add, np.maximum),
    (_ReduceOp.AVG, np.add, None),  # divided afterwards
    (_ReduceOp.PREMUL_SUM, np.add, None),  # multiplied before
    (_ReduceOp.PRODUCT, np.multiply, np.minimum),
    (_ReduceOp.MIN, np.minimum, np.minimum),
    (_ReduceOp.MAX, np.maximum, np.maximum),
    (_ReduceOp.BAND, np.bitwise_and, np.bitwise_and),
    (_ReduceOp.BOR, np.bitwise_or, np.bitwise_or),
    (_ReduceOp.BXOR, np.bitwise_xor, np.bitwise_xor),
)
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
_ORDERED = (np.minimum, np.maximum)
_HALVES = (torch.bfloat16, torch.float16)
# Open MPI's sums of these types saturate (ompi/mca/op/avx); torch's sums wrap around.
_NARROW = (torch.int8, torch.uint8, torch.int16)
_OVERFLOWING = (np.add, np.multiply)


@dataclass(frozen=True, slots=True)
class Reduction:
    """Arithmetic of two contributions, with the conversion of the values before and after it."""

    ufunc: np.ufunc
    factor: Any = None  # number or tensor by which every rank's values are multiplied first
    average: bool = False

    def begin(self, tensor: Tensor) -> Tensor:
        """Return the values of `tensor`, flat, on the host, in a type that numpy and MPI reduce.

        bfloat16 and float16 are reduced as float32 and rounded once, bool as uint8, sums and
        products of 8 and 16 bits as int32. The result is a view of the tensor if no conversion is
        needed.
        """
        if tensor.dtype in _HALVES:
            flat = flattened(tensor.detach().to(torch.float32))
        elif tensor.dtype == torch.bool:
            flat = flattened(tensor.detach().to(torch.uint8))
        elif tensor.dtype in _NARROW and self.ufunc in _OVERFLOWING:
            flat = flattened(tensor.detach().to(torch.int32))
        else:
            flat = wire_buffer(tensor)
        flat = on_host(flat)
        return flat if self.factor is None else flat * self.factor

    def end(self, flat: Tensor, size: int) -> None:
        """Divide the sum over `size` ranks if an average was requested."""
        if not self.average:
            return
        if flat.dtype.is_floating_point or flat.dtype.is_complex:
            flat.div_(size)
        else:
            flat.div_(size, rounding_mode="trunc")


def reduction_of(reduce_op: Any, dtype: torch.dtype) -> Reduction:
    """Return the arithmetic of torch's reduction. Raises ValueError if the type has none."""
    for theirs, ours, of_booleans in _OPERATIONS:
        ufunc = of_booleans if dtype == torch.bool else ours
        if reduce_op == theirs and ufunc is not None and _defined(ufunc, dtype):
            return Reduction(
                ufunc,
                factor=factor_of(reduce_op) if theirs == _ReduceOp.PREMUL_SUM else None,
                average=theirs == _ReduceOp.AVG,
            )
    raise ValueError(f"no reduction {_name(reduce_op)} for {dtype}")


def _defined(ufunc: np.ufunc, dtype: torch.dtype) -> bool:
    if dtype.is_floating_point and dtype.itemsize == 1:  # neither MPI nor numpy has float8
        return False
    if ufunc in _BITWISE:
        return not (dtype.is_floating_point or dtype.is_complex)
    return not (ufunc in _ORDERED and dtype.is_complex)


def _name(reduce_op: Any) -> str:
    """Return the name of a reduction, given as torch's ReduceOp or as its member."""
    return str(getattr(reduce_op, "op", reduce_op)).rpartition(".")[2]


def reduce_in_order(
    own: NDArray[Any], rank: int, others: dict[int, NDArray[Any]], ufunc: np.ufunc
) -> None:
    """Reduce all ranks' contributions in the order of the ranks into `own`; may overwrite `others`.

    The fixed order makes the result bit-identical wherever it is computed.
    """
    contributions = {**others, rank: own}
    first, *rest = sorted(contributions)
    result = contributions[first]
    for contributor in rest:
        contribution = contributions[contributor]
        # Elements of `own` must not be overwritten before they are used.
        target = own if contribution is own or result is own else result
        ufunc(result, contribution, out=target)
        result = target
