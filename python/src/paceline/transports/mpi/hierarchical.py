"""Hierarchical all-reduce: within each host through shared memory, between hosts once per host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from paceline.costs.message_schedules import between_hosts
from paceline.transports.mpi.message_channels import Traffic
from paceline.transports.mpi.message_collectives import MessageCollectives
from paceline.transports.mpi.rank_names import RankNames
from paceline.transports.mpi.shared_memory import owned

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from paceline.transports.mpi.shared_memory import SharedSegments

_SHORT_BYTES = 64 * 2**10


class Hierarchy:
    """All-reduce among ranks on several hosts, each with one or more ranks.

    Each host has as many leaders as the smallest host has ranks. Each leader reduces its part of
    the message for its host, exchanges it with the leaders of the other hosts that have the same
    part, and shares the result on its host. Each of H hosts sends 2 (H-1)/H n elements (ring; for
    two hosts the same by recursive doubling), independent of the number of its ranks.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        hosts: Sequence[int],
        segments: SharedSegments | None,
        limit_s: float,
    ) -> None:
        """Construct; collective. hosts: for each rank a number that is the same for all ranks of a
        host. segments: shared memory of this host's ranks; None for a single rank."""
        members = [rank for rank, host in enumerate(hosts) if host == hosts[comm.rank]]
        self._local_rank = members.index(comm.rank)
        self._segments = segments
        self._hosts = len(set(hosts))
        self._leaders = min(list(hosts).count(host) for host in hosts)
        carries = self._local_rank < self._leaders
        self._leader_comm = comm.Split(self._local_rank if carries else MPI.UNDEFINED, comm.rank)
        self._messages = None
        if carries:
            names = RankNames.gather(self._leader_comm, limit_s)
            self._messages = MessageCollectives(self._leader_comm, names, limit_s)

    def allreduce(self, buffer: NDArray[Any], ufunc: np.ufunc) -> Traffic:
        """Reduce a flat array over all ranks in place; all ranks get bit-identical results.

        Return the traffic that this rank sent to other hosts.
        """
        traffic = Traffic()
        if self._segments is not None:
            self._segments.reduce_scatter(buffer, ufunc, self._leaders)
        if self._messages is not None:
            own = buffer[owned(len(buffer), self._local_rank, self._leaders)]
            short = own.nbytes <= _SHORT_BYTES
            algorithm = "recursive-doubling" if short else between_hosts(self._hosts)
            traffic = self._messages.allreduce(own, ufunc, algorithm)
        if self._segments is not None:
            self._segments.all_gather(buffer, self._leaders)
        return traffic

    def close(self) -> None:
        """Free the communicator; collective."""
        if self._messages is not None:
            self._leader_comm.Free()


def hosts_of(comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return for each rank the lowest rank on its host with which it can share memory;
    collective."""
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        lowest = local.allreduce(comm.rank, MPI.MIN)
    finally:
        local.Free()
    return tuple(comm.allgather(lowest))
