"""Memory that the ranks of one host share, and where they meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import TimedOut
from paceline.transports.base import PeerLost
from paceline.transports.group_store import GroupStore
from paceline.transports.mpi.shared import SharedSegments, segment_bytes
from paceline.transports.shared.node import SharedNode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._C._distributed_c10d import Store

    from paceline.transports.mpi.names import Names


class Host:
    """The ranks of a group that run on this host."""

    def __init__(
        self, members: Sequence[int], rank: int, names: Names, store: Store, limit_s: float
    ) -> None:
        """Collective over `members`. names: of the group's ranks; store: of the group alone.

        Raises EnvironmentLacks, on all members, if they cannot share memory, TimedOut if not all
        come.
        """
        self._world_rank = names.world_ranks[rank]
        local_rank, size = members.index(rank), len(members)
        local_ranks = ", ".join(map(str, range(size)))
        self._who = f"local ranks {local_ranks} are ranks {names.numbers(members)}"
        share = GroupStore(
            store, local_rank, size, prefix=f"host of rank {names.world_ranks[members[0]]}"
        )
        self._node = SharedNode(share, limit_s)
        self._barrier = self._node.barrier(range(size))
        memory = self._node.memory("all-reduce", segment_bytes(size))
        self.segments = SharedSegments(
            memory, local_rank, size, lambda: self.synchronise("allreduce")
        )

    def synchronise(self, name: str) -> None:
        """Return when all members have come to operation `name`, asleep until then.

        Raises TimedOut, or PeerLost if a member died.
        """
        try:
            self._barrier.wait()
        except TimedOut as error:
            raise TimedOut(self._explained(name, error)) from error
        except PeerLost as error:
            raise PeerLost(self._explained(name, error), error.rank) from error

    def close(self) -> None:
        self._node.close()

    def _explained(self, name: str, error: Exception) -> str:
        return f"rank {self._world_rank}: MPI {name}: {error} ({self._who})"
