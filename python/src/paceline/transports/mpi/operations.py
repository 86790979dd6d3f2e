"""What torch's reductions mean to MPI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from paceline.transports.mpi.buffers import flattened, host_copy, on_wire

if TYPE_CHECKING:
    from torch import Tensor

_ReduceOp: Any = dist.ReduceOp  # its members are of another type than the options' values

# torch's reduction, MPI's, and MPI's on 0 and 1 for booleans (a sum of them is true if any is).
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
# Open MPI's sums of these saturate (ompi/mca/op/avx adds them so); torch's and everybody's wrap.
_NARROW = (torch.int8, torch.uint8, torch.int16)
_OVERFLOWING = (MPI.SUM, MPI.PROD)


@dataclass(frozen=True, slots=True)
class Reduction:
    """An MPI operation, with what is done to the numbers before and after it."""

    operation: MPI.Op
    factor: Any = None  # number or tensor that every rank's numbers are multiplied with first
    average: bool = False

    def begin(self, tensor: Tensor) -> Tensor:
        """The numbers of `tensor`, flat, on the host, of a type that MPI reduces.

        bfloat16 and float16 are reduced as float32 and rounded once, bool as uint8; sums and
        products of 8 and 16 bits as int32. A view of the tensor where nothing must change.
        """
        if tensor.dtype in _HALVES:
            flat = flattened(tensor.detach().to(torch.float32))
        elif tensor.dtype == torch.bool:
            flat = flattened(tensor.detach().to(torch.uint8))
        elif tensor.dtype in _NARROW and self.operation in _OVERFLOWING:
            flat = flattened(tensor.detach().to(torch.int32))
        else:
            flat = on_wire(tensor)
        if flat.device.type != "cpu":  # MPI would fetch the numbers to the host as well
            flat = host_copy(flat)
        return flat if self.factor is None else flat * self.factor

    def end(self, flat: Tensor, size: int) -> None:
        """Make the result of the sum over `size` ranks an average, if that is what is wanted."""
        if not self.average:
            return
        if flat.dtype.is_floating_point or flat.dtype.is_complex:
            flat.div_(size)
        else:
            flat.div_(size, rounding_mode="trunc")


def reduction_of(reduce_op: Any, dtype: torch.dtype) -> Reduction:
    """MPI's way for torch's reduction. Raises ValueError if there is none for the type."""
    for theirs, ours, of_booleans in _OPERATIONS:
        operation = of_booleans if dtype == torch.bool else ours
        if reduce_op == theirs and operation is not None and _defined(operation, dtype):
            return Reduction(
                operation,
                factor=_factor(reduce_op) if theirs == _ReduceOp.PREMUL_SUM else None,
                average=theirs == _ReduceOp.AVG,
            )
    raise ValueError(f"transport mpi: no reduction {_name(reduce_op)} for {dtype}")


def _defined(operation: MPI.Op, dtype: torch.dtype) -> bool:
    if dtype.is_floating_point and dtype.itemsize == 1:  # float8: neither MPI nor numpy has it
        return False
    if operation in _BITWISE:
        return not (dtype.is_floating_point or dtype.is_complex)
    return not (operation in _ORDERED and dtype.is_complex)


def _factor(reduce_op: Any) -> Any:
    """Of a PREMUL_SUM: torch gives it away only as what a pickle would hold."""
    _, factor = reduce_op.__getstate__()
    return factor


def _name(reduce_op: Any) -> str:
    """Of a reduction, whether it is torch's ReduceOp or the member of it."""
    return str(getattr(reduce_op, "op", reduce_op)).rpartition(".")[2]
