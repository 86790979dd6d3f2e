"""Who the ranks of a communicator are to the user: their ranks in MPI's world, and their hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from paceline.host.machine import host_name
from paceline.transports.mpi.polling import poll
from paceline.transports.work import timed_out

if TYPE_CHECKING:
    from collections.abc import Iterable


_TOLD = np.dtype([("rank", np.int64), ("host", "S256")])  # Linux has 64 bytes for a host's name


@dataclass(frozen=True, slots=True)
class Names:
    """For messages: a number of a sub-group says nothing to whoever looks for a rank's log."""

    world_ranks: tuple[int, ...]  # by rank of the communicator
    hosts: tuple[str, ...]

    @classmethod
    def of(cls, comm: MPI.Comm, limit_s: float) -> Names:
        """Collective over `comm`. Raises TimedOut if a rank does not come within `limit_s`."""
        own = np.zeros(1, _TOLD)
        own["rank"], own["host"] = MPI.COMM_WORLD.rank, host_name().encode()
        told = np.zeros(comm.size, _TOLD)
        # not the blocking one, which spins and cannot be given up
        if not poll(comm.Iallgather(own.view(np.uint8), told.view(np.uint8)), limit_s):
            raise timed_out("MPI start of a group", MPI.COMM_WORLD.rank, limit_s)
        return cls(
            tuple(int(rank) for rank in told["rank"]),
            tuple(host.decode(errors="replace") for host in told["host"]),
        )

    def __call__(self, rank: int) -> str:
        """The name of the communicator's rank, as in "rank 3 (host-b)"."""
        return f"rank {self.world_ranks[rank]} ({self.hosts[rank]})"

    def numbers(self, ranks: Iterable[int]) -> str:
        """Ranks in MPI's world of some of the communicator's, as in "1, 3"."""
        return ", ".join(str(self.world_ranks[rank]) for rank in ranks)
