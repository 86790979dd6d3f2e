"""World ranks and host names of the ranks of a communicator, for messages to the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from paceline.host.machine import host_name
from paceline.transports.mpi.polling import complete

if TYPE_CHECKING:
    from collections.abc import Iterable


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

    def format_ranks(self, ranks: Iterable[int]) -> str:
        """Return the world ranks of the given ranks as text, for example "1, 3"."""
        return ", ".join(str(self.world_ranks[rank]) for rank in ranks)
