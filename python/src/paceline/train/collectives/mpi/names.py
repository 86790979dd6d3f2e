"""Who the ranks of a communicator are to the user: their ranks in MPI's world, and their hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpi4py import MPI

from paceline.records.machine import host_name

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Names:
    """For messages: a number of a sub-group says nothing to whoever looks for a rank's log."""

    world_ranks: tuple[int, ...]  # by rank of the communicator
    hosts: tuple[str, ...]

    @classmethod
    def of(cls, comm: MPI.Comm) -> Names:
        """Collective over `comm`."""
        told = comm.allgather((MPI.COMM_WORLD.rank, host_name()))
        return cls(tuple(rank for rank, _ in told), tuple(host for _, host in told))

    def __call__(self, rank: int) -> str:
        """The name of the communicator's rank, as in "rank 3 (host-b)"."""
        return f"rank {self.world_ranks[rank]} ({self.hosts[rank]})"

    def numbers(self, ranks: Iterable[int]) -> str:
        """Ranks in MPI's world of some of the communicator's, as in "1, 3"."""
        return ", ".join(str(self.world_ranks[rank]) for rank in ranks)
