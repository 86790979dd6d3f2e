"""Describe flat tensors as buffers of MPI calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI
from torch import Tensor

from paceline.transports.buffers import byte_view

# MPI types that move elements of a given size. Bytes would exceed MPI's count limit sooner.
_UNITS = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}
_LARGEST_COUNT = 2**31 - 1  # elements: MPI counts and offsets are of type int


def message_of(flat: Tensor) -> list[Any]:
    """Describe a flat tensor as the buffer of one MPI call."""
    _check_count(len(flat))
    return [byte_view(flat), len(flat), _UNITS[flat.element_size()]]


def vector_message(flat: Tensor, lengths: Sequence[int]) -> list[Any]:
    """Describe a flat tensor as consecutive parts of `lengths` elements, one for each rank."""
    _check_count(len(flat))
    offsets = [sum(lengths[:rank]) for rank in range(len(lengths))]
    return [byte_view(flat), (list(lengths), offsets), _UNITS[flat.element_size()]]


def _check_count(count: int) -> None:
    if count > _LARGEST_COUNT:
        raise ValueError(
            f"transport mpi: one operation moves at most {_LARGEST_COUNT} elements, got {count}; "
            "split the tensor"
        )
