"""MPI_COMM_WORLD for the job around the training: values of all ranks, barrier, abort.

Importing this initialises MPI, but not torch, which is imported only after a rank has its cores.
"""

from __future__ import annotations

from typing import TypeVar

from mpi4py import MPI

from paceline.errors import TimedOut
from paceline.transports.mpi.polling import poll

_POLL_S = 0.02
_Value = TypeVar("_Value")


class World:
    """All ranks of the MPI job of this process. Construction is collective."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self._node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        self.local_rank: int = self._node.rank
        self.ranks_on_node: int = self._node.size

    def gather(self, value: _Value) -> list[_Value]:
        """Return every rank's value, by rank; collective."""
        return self._comm.allgather(value)

    def of_rank_0(self, value: _Value | None) -> _Value | None:
        """Return rank 0's value; collective."""
        found: _Value | None = self._comm.bcast(value)
        return found

    def of_this_node(self, value: _Value) -> _Value:
        """Return the value of this node's first rank; collective."""
        found: _Value = self._node.bcast(value)
        return found

    def wait_for_all(self, limit_s: float) -> None:
        """Wait for all ranks, because a trial ends with its last rank. Raises TimedOut after
        `limit_s`."""
        if not poll(self._comm.Ibarrier(), limit_s, longest_sleep_s=_POLL_S):
            raise TimedOut(f"rank {self.rank} waited {limit_s:g} s for the other ranks to finish")

    def abort(self, exit_code: int) -> None:
        """End every rank of the job at once; does not return."""
        self._comm.Abort(exit_code)
