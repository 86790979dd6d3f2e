"""MPI_COMM_WORLD: values of all ranks, barrier and abort for the job, and names of ranks.

Importing this initialises MPI, but not torch, which is imported only after a rank has its cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from paceline.collectives.errors import TimedOut
from paceline.collectives.host import host_name
from paceline.collectives.mpi.polling import complete, poll_until

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
        if not poll_until(self._comm.Ibarrier().Test, limit_s, longest_sleep_s=_POLL_S):
            raise TimedOut(f"rank {self.rank} waited {limit_s:g} s for the other ranks to finish")

    def abort(self, exit_code: int) -> None:
        """End every rank of the job at once; does not return."""
        self._comm.Abort(exit_code)


_RECORD = np.dtype([("rank", np.int64), ("host", "S256")])  # Linux host names have 64 bytes


@dataclass(frozen=True, slots=True)
class RankNames:
    """Names of ranks. A rank number within a sub-group does not identify a rank's log, its world
    rank does."""

    world_ranks: tuple[int, ...]  # by rank of the communicator
    hosts: tuple[str, ...]

    @classmethod
    def gather(cls, comm: MPI.Comm, limit_s: float) -> RankNames:
        """Exchange names; collective over `comm`. Raises TimedOut if a rank does not take part
        within `limit_s`."""
        own = np.zeros(1, _RECORD)
        own["rank"], own["host"] = MPI.COMM_WORLD.rank, host_name().encode()
        gathered = np.zeros(comm.size, _RECORD)
        # Non-blocking, because the blocking call spins and cannot be given up.
        request = comm.Iallgather(own.view(np.uint8), gathered.view(np.uint8))
        complete(request, "start of a group", MPI.COMM_WORLD.rank, limit_s)
        return cls(
            tuple(int(rank) for rank in gathered["rank"]),
            tuple(host.decode(errors="replace") for host in gathered["host"]),
        )

    def __call__(self, rank: int) -> str:
        """Return the name of a rank of the communicator, for example "rank 3 (host-b)"."""
        return f"rank {self.world_ranks[rank]} ({self.hosts[rank]})"
