"""MPI's reductions on numbers, as numpy computes them."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

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
    """Raises ValueError for one that is none of MPI's own on numbers."""
    for known, ufunc in _UFUNCS:
        if known == operation:
            return ufunc
    raise ValueError(f"transport mpi: no arithmetic for {operation}")
