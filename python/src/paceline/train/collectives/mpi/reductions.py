"""All-reduce over one group of ranks, by the way that suits where they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from paceline.data.node import MemoryUse, node_memory
from paceline.train.collectives.group_store import GroupStore
from paceline.train.collectives.mpi.buffers import pieces
from paceline.train.collectives.mpi.polling import poll
from paceline.train.collectives.mpi.shared import SHARED_BYTES, SharedSegments, one_host
from paceline.train.collectives.work import timed_out

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch._C._distributed_c10d import Store

    from paceline.spec.values import Algorithm

_USE = MemoryUse("the ranks' shared segments", 'use transport "gloo"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """How an all-reduce went, seen from this rank."""

    algorithm: str
    sent_bytes: int | None = None  # None where nobody counts: MPI's own, and shared memory
    sent_messages: int | None = None


class Reductions:
    """Of the ranks of `comm`; to be called by one thread, in the same order on all ranks."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        rank: int,
        size: int,
        store: Store,
        limit_s: float,
        algorithm: Algorithm,
    ) -> None:
        """Collective. limit_s: of every wait; store: of this group alone."""
        self._comm = comm
        self._rank = rank
        self._size = size
        self._limit_s = limit_s
        self._algorithm = algorithm
        self._shared: SharedSegments | None = None
        if size > 1 and one_host(comm):
            self._shared = self._share_memory(store)

    def allreduce(self, buffer: NDArray[Any], operation: MPI.Op) -> Carried:
        """Reduce a flat array over all ranks, in place; all ranks get the very same bits.

        Raises TimedOut if a peer does not come to it within the limit.
        """
        if self._shared is not None:
            self._shared.allreduce(buffer, operation)
            return Carried(algorithm="shared")
        self.meet("allreduce")
        for piece in pieces(buffer):
            self._comm.Allreduce(MPI.IN_PLACE, piece, operation)
        return Carried(algorithm="native")

    def meet(self, name: str) -> None:
        """Return when every rank has come to operation `name`; see MpiProcessGroup._submit."""
        if not poll(self._comm.Ibarrier(), self._limit_s):
            raise timed_out(f"MPI {name}", self._rank, self._limit_s)

    def describe(self) -> dict[str, Any]:
        """What a reader of the results should know: how messages of which size are reduced."""
        return {"algorithm": "shared" if self._shared is not None else "native"}

    def close(self) -> None:
        """Give back what is shared; calls no peer."""
        self._shared = None

    def _share_memory(self, store: Store) -> SharedSegments | None:
        """Memory of all ranks; None where they cannot see one another's (containers, say)."""
        meeting_place = GroupStore(store, self._rank, self._size)
        memory = node_memory(meeting_place, SHARED_BYTES, self._limit_s, _USE)
        if not memory.shared:
            return None
        array = np.frombuffer(memory.buffer, dtype=np.uint8)
        return SharedSegments(array, self._rank, self._size, lambda: self.meet("allreduce"))
