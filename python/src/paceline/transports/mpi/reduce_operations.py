"""Reductions: torch's operations as MPI operations, and MPI operations as numpy arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

from paceline.torch_internals import factor_of
from paceline.transports.mpi.buffers import flattened, on_host, wire_buffer

_ReduceOp: Any = dist.ReduceOp  # its members are of another type than the options' values

# torch's reduction, MPI's, and MPI's on 0 and 1 for booleans (a sum is true if any value is).
_OPERATIONS = (
    (_ReduceOp.SUM, MPI.SUM, MPI.MAX),
    (_ReduceOp.AVG, MPI.SUM, None),  # divided afterwards
    (_ReduceOp.PREMUL_SUM, MPI.SUM, None),  # multiplied before
    (_ReduceOp.PRODUCT, MPI.PROD, MPI.MIN),
    (_ReduceOp.MIN, MPI.MIN, MPI.MIN),
    (_ReduceOp.MAX, MPI.MAX, MPI.MAX),
    (_ReduceOp.BAND, MPI.BAND, MPI.BAND),
    (_ReduceOp.BOR, MPI.BOR, MPI.BOR),
    (_ReduceOp.BXOR, MPI.BXOR, MPI.BXOR),
)
_BITWISE = (MPI.BAND, MPI.BOR, MPI.BXOR)
_ORDERED = (MPI.MIN, MPI.MAX)
_HALVES = (torch.bfloat16, torch.float16)
# Open MPI's sums of these types saturate (ompi/mca/op/avx); torch's sums wrap around.
_NARROW = (torch.int8, torch.uint8, torch.int16)
_OVERFLOWING = (MPI.SUM, MPI.PROD)


@dataclass(frozen=True, slots=True)
class Reduction:
    """An MPI operation, with the conversion of the values before and after it."""

    operation: MPI.Op
    factor: Any = None  # number or tensor by which every rank's values are multiplied first
    average: bool = False

    def begin(self, tensor: Tensor) -> Tensor:
        """Return the values of `tensor`, flat, on the host, in a type that MPI reduces.

        bfloat16 and float16 are reduced as float32 and rounded once, bool as uint8, sums and
        products of 8 and 16 bits as int32. The result is a view of the tensor if no conversion is
        needed.
        """
        if tensor.dtype in _HALVES:
            flat = flattened(tensor.detach().to(torch.float32))
        elif tensor.dtype == torch.bool:
            flat = flattened(tensor.detach().to(torch.uint8))
        elif tensor.dtype in _NARROW and self.operation in _OVERFLOWING:
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
    """Return MPI's equivalent of torch's reduction. Raises ValueError if the type has none."""
    for theirs, ours, of_booleans in _OPERATIONS:
        operation = of_booleans if dtype == torch.bool else ours
        if reduce_op == theirs and operation is not None and _defined(operation, dtype):
            return Reduction(
                operation,
                factor=factor_of(reduce_op) if theirs == _ReduceOp.PREMUL_SUM else None,
                average=theirs == _ReduceOp.AVG,
            )
    raise ValueError(f"transport mpi: no reduction {_name(reduce_op)} for {dtype}")


def _defined(operation: MPI.Op, dtype: torch.dtype) -> bool:
    if dtype.is_floating_point and dtype.itemsize == 1:  # neither MPI nor numpy has float8
        return False
    if operation in _BITWISE:
        return not (dtype.is_floating_point or dtype.is_complex)
    return not (operation in _ORDERED and dtype.is_complex)


def _name(reduce_op: Any) -> str:
    """Return the name of a reduction, given as torch's ReduceOp or as its member."""
    return str(getattr(reduce_op, "op", reduce_op)).rpartition(".")[2]


_UFUNCS: tuple[tuple[MPI.Op, np.ufunc], ...] = (
    (MPI.SUM, np.add),
    (MPI.PROD, np.multiply),
    (MPI.MIN, np.minimum),
    (MPI.MAX, np.maximum),
    (MPI.BAND, np.bitwise_and),
    (MPI.BOR, np.bitwise_or),
    (MPI.BXOR, np.bitwise_xor),
)


def ufunc_of(operation: MPI.Op) -> np.ufunc:
    """Return the numpy function of an MPI operation. Raises ValueError for a user-defined
    operation."""
    for known, ufunc in _UFUNCS:
        if known == operation:
            return ufunc
    raise ValueError(f"transport mpi: no arithmetic for {operation}")


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
