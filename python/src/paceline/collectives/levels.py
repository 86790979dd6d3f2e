"""Collectives in two levels: shared memory within each host, Gloo between the leaders of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.collectives.description import GroupDescription
from paceline.collectives.errors import TIMED_OUT, EnvironmentLacks, PeerLost, TimedOut
from paceline.collectives.host import host_identity
from paceline.collectives.node.memory import gather
from paceline.collectives.shared_memory import HostGroup, Leaders, open_host_group
from paceline.collectives.store import GroupStore
from paceline.collectives.torch_internals import PrefixStore, ProcessGroupGloo, Store

LIBRARY = "shared memory"
# Gloo reduces these between hosts: what `Reduction.begin` returns for all types but a few integers.
_BETWEEN_HOSTS = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8)
_ReduceOp: Any = dist.ReduceOp
_GLOO_OPERATIONS = {
    np.add: _ReduceOp.SUM,
    np.multiply: _ReduceOp.PRODUCT,
    np.minimum: _ReduceOp.MIN,
    np.maximum: _ReduceOp.MAX,
}


class Levels:
    """The ranks of a group, by host. One thread at a time uses it, in the same order on all
    ranks."""

    def __init__(self, rank: int, world_ranks: Sequence[int], store: Store, limit_s: float) -> None:
        """Construct; collective. world_ranks: by rank of the group. store: used by this only.

        Raises EnvironmentLacks on all ranks if no two of them share memory, or those of a host
        cannot, TimedOut if a rank does not take part.
        """
        ranks = len(world_ranks)
        hosts = gather(GroupStore(store, rank, ranks, "hosts"), host_identity(), limit_s)
        self.hosts = len(set(hosts))
        self.algorithm = "shared" if self.hosts == 1 else "hierarchical"
        self._world_rank, self._limit_s = world_ranks[rank], limit_s
        if self.hosts == ranks:
            raise EnvironmentLacks("each rank is on a host of its own")
        reasons = GroupStore(store, rank, ranks, "reasons")
        self._host: HostGroup | None = open_host_group(
            LIBRARY, hosts, rank, world_ranks, store, limit_s,
            partial(gather, reasons, timeout_s=limit_s),
        )  # fmt: skip
        self._leaders = Leaders(hosts, rank)
        self._between: Any = None  # a ProcessGroupGloo
        if self.hosts > 1 and self._leaders.include_this_rank:
            self._connect(store, hosts, rank)

    @property
    def host(self) -> HostGroup:
        """Return the ranks of this host: several, and all where there is one host."""
        assert self._host is not None
        return self._host

    def reduces(self, dtype: torch.dtype, ufunc: np.ufunc) -> bool:
        """Return whether values of this type can be reduced. dtype: after `Reduction.begin`."""
        return self.hosts == 1 or (dtype in _BETWEEN_HOSTS and ufunc in _GLOO_OPERATIONS)

    def allreduce(self, buffer: NDArray[Any], ufunc: np.ufunc) -> None:
        """Reduce a flat array over all ranks in place; all ranks get bit-identical results.

        Raises TimedOut if a peer does not take part within the limit, PeerLost if a peer died.
        """
        if self.hosts == 1:
            self.host.segments.allreduce(buffer, ufunc)
        else:
            self._leaders.allreduce(buffer, ufunc, self._host, self._exchange)

    def describe(self) -> GroupDescription:
        """Return how messages are reduced, for the records."""
        return {"algorithm": self.algorithm, "hosts": self.hosts}

    def fail(self) -> None:
        """Let the ranks of this host that wait, now or later, get PeerLost."""
        if self._host is not None:
            self._host.fail()

    def close(self, loss: str = "") -> None:
        """Leave; does not wait for other ranks. loss: of another rank, if that is the reason."""
        if self._host is not None:
            self._host.close(loss)
            self._host = None

    def _connect(self, store: Store, hosts: Sequence[str], rank: int) -> None:
        """Connect the leaders with the same part, in the order of their hosts' first ranks."""
        first_ranks = {host: hosts.index(host) for host in dict.fromkeys(hosts)}
        place = list(first_ranks).index(hosts[rank])
        self._between = ProcessGroupGloo(
            PrefixStore(f"leaders {self._leaders.local_rank}", store),
            place,
            self.hosts,
            timeout=timedelta(seconds=self._limit_s),
        )

    def _exchange(self, part: NDArray[Any], ufunc: np.ufunc) -> None:
        assert self._between is not None
        options = dist.AllreduceOptions()
        options.reduceOp = _GLOO_OPERATIONS[ufunc]
        try:
            self._between.allreduce([torch.from_numpy(part)], options).wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> PeerLost | TimedOut:
        text = str(error).splitlines()[0]
        where = f"rank {self._world_rank}: all-reduce between hosts"
        if TIMED_OUT.search(text):
            return TimedOut(
                f"{where} did not end within {self._limit_s:g} s: a host does not take part; look "
                f"at its ranks' logs. Gloo reports: {text}"
            )
        return PeerLost(
            f"{where}: a rank of another host has ended; look at the ranks' logs. Gloo reports: "
            f"{text}",
            self._world_rank,
        )
