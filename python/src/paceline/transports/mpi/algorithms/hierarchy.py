"""All-reduce on several hosts: within each through memory, and between them once for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from paceline.transports.mpi.algorithms.exchange import Exchange, Traffic
from paceline.transports.mpi.algorithms.loads import between_hosts
from paceline.transports.mpi.names import Names
from paceline.transports.mpi.shared import owned

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from paceline.transports.mpi.shared import SharedSegments

_SHORT_BYTES = 64 * 2**10


class Hierarchy:
    """Of ranks on several hosts, of which each has one or more.

    A message is dealt out among as many ranks of each host as the smallest host has: each reduces
    its share for its host, exchanges it with its counterparts on the other hosts, and hands the
    result to its host. So between hosts go 2 (H-1)/H n elements from each of H hosts (ring; with
    two hosts the same by recursive doubling), whatever the number of ranks on them.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        hosts: Sequence[int],
        segments: SharedSegments | None,
        limit_s: float,
    ) -> None:
        """Collective. hosts: of each rank, as a number that is the same for the ranks of a host;
        segments: of the ranks of this one's host, None if it is alone there."""
        members = [rank for rank, host in enumerate(hosts) if host == hosts[comm.rank]]
        self._local_rank = members.index(comm.rank)
        self._segments = segments
        self._hosts = len(set(hosts))
        self._carriers = min(list(hosts).count(host) for host in hosts)
        carries = self._local_rank < self._carriers
        self._counterparts = comm.Split(self._local_rank if carries else MPI.UNDEFINED, comm.rank)
        self._exchange = None
        if carries:
            names = Names.of(self._counterparts, limit_s)
            self._exchange = Exchange(self._counterparts, names, limit_s)

    def allreduce(self, buffer: NDArray[Any], ufunc: np.ufunc) -> Traffic:
        """Reduce a flat array over all ranks, in place; all ranks get the very same bits.

        The traffic is what this rank sent to other hosts.
        """
        traffic = Traffic()
        if self._segments is not None:
            self._segments.reduce_scatter(buffer, ufunc, self._carriers)
        if self._exchange is not None:
            share = buffer[owned(len(buffer), self._local_rank, self._carriers)]
            short = share.nbytes <= _SHORT_BYTES
            algorithm = "recursive-doubling" if short else between_hosts(self._hosts)
            traffic = self._exchange.allreduce(share, ufunc, algorithm)
        if self._segments is not None:
            self._segments.all_gather(buffer, self._carriers)
        return traffic

    def close(self) -> None:
        """Collective."""
        if self._exchange is not None:
            self._counterparts.Free()


def hosts_of(comm: MPI.Intracomm) -> tuple[int, ...]:
    """For each rank the lowest rank of its host, where they can share memory; collective."""
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        lowest = local.allreduce(comm.rank, MPI.MIN)
    finally:
        local.Free()
    return tuple(comm.allgather(lowest))
