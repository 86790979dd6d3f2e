"""Tensors as buffers that MPI can send and reduce."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from mpi4py import MPI

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

# Open MPI's Allreduce takes a temporary as large as the message. In pieces that stay in the
# caches, 100 MB takes 9 ms instead of 32 to 54 (two ranks in shared memory; 2 to 8 MiB are alike).
PIECE_BYTES = 4 * 2**20

# torch's reduction, MPI's, and MPI's on 0 and 1 for booleans (a sum of them is true if any is).
_OPERATIONS = (
    (dist.ReduceOp.SUM, MPI.SUM, MPI.MAX),
    (dist.ReduceOp.AVG, MPI.SUM, None),  # divided afterwards
    (dist.ReduceOp.PRODUCT, MPI.PROD, MPI.MIN),
    (dist.ReduceOp.MIN, MPI.MIN, MPI.MIN),
    (dist.ReduceOp.MAX, MPI.MAX, MPI.MAX),
    (dist.ReduceOp.BAND, MPI.BAND, MPI.BAND),
    (dist.ReduceOp.BOR, MPI.BOR, MPI.BOR),
    (dist.ReduceOp.BXOR, MPI.BXOR, MPI.BXOR),
)


def operation_of(reduce_op: Any, dtype: torch.dtype) -> MPI.Op:
    """MPI's operation for torch's. Raises ValueError if there is none."""
    for theirs, ours, of_booleans in _OPERATIONS:
        operation = of_booleans if dtype == torch.bool else ours
        if reduce_op == theirs and operation is not None:
            return operation
    raise ValueError(f"transport mpi: no reduction {reduce_op} for {dtype}")


def is_average(reduce_op: Any) -> bool:
    return bool(reduce_op == dist.ReduceOp.AVG)


@contextmanager
def reducible(tensor: Tensor) -> Iterator[Tensor]:
    """A flat tensor of a type that MPI reduces, written back into `tensor` at the end.

    bfloat16 and float16 are reduced as float32 and rounded once, bool as uint8.
    """
    if tensor.dtype in (torch.bfloat16, torch.float16):
        buffer = tensor.detach().to(torch.float32).reshape(-1)
    elif tensor.dtype == torch.bool:
        buffer = tensor.detach().to(torch.uint8).reshape(-1)
    else:
        buffer = tensor.detach().reshape(-1)  # a view if contiguous, else a copy
    yield buffer
    if buffer.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(buffer.view(tensor.shape))


@contextmanager
def as_bytes(tensor: Tensor, *, written: bool) -> Iterator[Any]:
    """The bytes of `tensor` as a numpy array, in the order of its elements.

    written: MPI writes into them, so they go back into a tensor that is not contiguous.
    """
    flat = tensor.detach().reshape(-1)
    yield flat.view(torch.uint8).numpy()
    if written and flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def pieces(buffer: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Consecutive parts, PIECE_BYTES long, of a flat array; of an empty one none."""
    length = max(1, PIECE_BYTES // buffer.itemsize)
    for start in range(0, len(buffer), length):
        yield buffer[start : start + length]


def divide(tensor: Tensor, by: int) -> None:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.div_(by)
    else:
        tensor.div_(by, rounding_mode="trunc")
