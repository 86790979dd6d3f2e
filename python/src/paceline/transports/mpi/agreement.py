"""Decisions of rank 0 that all ranks follow."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.transports.mpi.polling import complete

if TYPE_CHECKING:
    from mpi4py import MPI


def of_rank_0(value: Any, comm: MPI.Intracomm, world_rank: int, limit_s: float) -> Any:
    """Return rank 0's JSON value on all ranks; collective. Raises TimedOut."""
    text = json.dumps(value).encode()
    length = np.array([len(text)], np.int64)
    complete(comm.Ibcast(length, 0), "calibration", world_rank, limit_s)
    content = np.zeros(int(length[0]), np.uint8)
    if comm.rank == 0:
        content[:] = np.frombuffer(text, np.uint8)
    complete(comm.Ibcast(content, 0), "calibration", world_rank, limit_s)
    return json.loads(content.tobytes())
