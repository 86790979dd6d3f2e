"""All-reduce over one group of ranks, by the way that suits where they are."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from paceline.errors import EnvironmentLacks
from paceline.transports.mpi.algorithms.calibration import Choice, calibrate
from paceline.transports.mpi.algorithms.exchange import Exchange, Traffic
from paceline.transports.mpi.algorithms.hierarchy import Hierarchy, hosts_of
from paceline.transports.mpi.algorithms.loads import link_load
from paceline.transports.mpi.algorithms.operations import ufunc_of
from paceline.transports.mpi.buffers import pieces
from paceline.transports.mpi.host import Host
from paceline.transports.mpi.polling import poll
from paceline.transports.work import timed_out

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch._C._distributed_c10d import Store

    from paceline.spec.values import Algorithm
    from paceline.transports.mpi.names import Names

# MPI's own is none of them: it spins, on cores that are not idle here (25 MB in 12 s where 0.4 s
# would do, with two ranks on each core), and cannot be given up. Nor are the papers' two.
_CANDIDATES = ("recursive-doubling", "ring", "rabenseifner")


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
        names: Names,
        store: Store,
        limit_s: float,
        algorithm: Algorithm,
    ) -> None:
        """Collective. names: of the ranks of `comm`; store: of this group alone; limit_s: of every
        wait.

        algorithm: "auto" is shared memory on one host; else, or where memory cannot be shared, what
        a calibration finds, here if the group is the whole world, otherwise at the first message.
        """
        self._comm = comm
        self._rank, self._size = comm.rank, comm.size
        self._names = names
        self._limit_s = limit_s
        self._asked = algorithm
        self._hosts = hosts_of(comm)
        self._host: Host | None = None
        self._why_not_shared: str | None = None
        self._hierarchy: Hierarchy | None = None
        self._exchange: Exchange | None = None
        self._exchange_comm = MPI.COMM_NULL
        self._choice: Choice | None = None
        self._way = self._prepare(store)
        if self._way == "auto" and self._size == MPI.COMM_WORLD.size:
            self._choice = self._calibrate()

    def allreduce(self, buffer: NDArray[Any], operation: MPI.Op) -> Carried:
        """Reduce a flat array over all ranks, in place; all ranks get the very same bits.

        Raises TimedOut if a peer does not come to it within the limit, PeerLost if one has died.
        """
        algorithm = self._way
        if algorithm == "auto":
            if self._choice is None:
                self._choice = self._calibrate()
            algorithm = self._choice.algorithm_for(buffer.nbytes)
        traffic = self._carry_out(algorithm, buffer, operation)
        if traffic is None:
            return Carried(algorithm=algorithm)
        return Carried(
            algorithm=algorithm, sent_bytes=traffic.bytes, sent_messages=traffic.messages
        )

    def synchronise(self, name: str) -> None:
        """Return when every rank has come to operation `name`; see MpiProcessGroup._submit."""
        if self._host is not None and len(set(self._hosts)) == 1:
            self._host.synchronise(name)
        elif not poll(self._comm.Ibarrier(), self._limit_s):
            raise timed_out(f"MPI {name}", self._names.world_ranks[self._rank], self._limit_s)

    def describe(self) -> dict[str, Any]:
        """What a reader of the results should know: how messages of which size are reduced."""
        described: dict[str, Any] = {"algorithm": self._way, "hosts": len(set(self._hosts))}
        if self._why_not_shared is not None:
            described["not_shared"] = self._why_not_shared
        if self._choice is not None:
            described["by_size"] = [asdict(choice) for choice in self._choice.bins]
            described["calibration_s"] = {
                name: dict(zip(map(str, curve.bytes), curve.seconds, strict=True))
                for name, curve in self._choice.curves.items()
            }
            described["calibration_took_s"] = self._choice.took_s
        return described

    def close(self) -> None:
        """Give back what is shared; collective."""
        if self._host is not None:
            self._host.close()
            self._host = None
        if self._hierarchy is not None:
            self._hierarchy.close()
            self._hierarchy = None
        if self._exchange is not None:
            self._exchange_comm.Free()
            self._exchange = None

    def _prepare(self, store: Store) -> str:
        """Make what the asked algorithm needs; returns the one that is used."""
        asked = self._asked
        if self._size == 1:
            return "alone"
        hosts = len(set(self._hosts))
        levels = hosts < self._size or asked == "hierarchical"
        if asked in {"auto", "hierarchical"} and levels and self._share_memory(store):
            if hosts == 1:
                return "shared"
            segments = self._host.segments if self._host is not None else None
            self._hierarchy = Hierarchy(self._comm, self._hosts, segments, self._limit_s)
        if asked == "hierarchical" and self._hierarchy is None:
            asked = "auto"
        if asked not in {"native", "hierarchical"}:
            self._exchange_comm = self._comm.Dup()
            self._exchange = Exchange(self._exchange_comm, self._names, self._limit_s)
        return asked

    def _share_memory(self, store: Store) -> bool:
        """Whether the ranks of every host share memory (they do not across containers, say)."""
        own = self._hosts[self._rank]
        members = [rank for rank, host in enumerate(self._hosts) if host == own]
        try:
            if len(members) > 1:
                self._host = Host(members, self._rank, self._names, store, self._limit_s)
        except EnvironmentLacks as error:
            self._why_not_shared = str(error)
        reasons = [reason for reason in self._comm.allgather(self._why_not_shared) if reason]
        if reasons:
            self._why_not_shared = reasons[0]
            if self._host is not None:
                self._host.close()
                self._host = None
        return not reasons

    def _carry_out(self, algorithm: str, buffer: NDArray[Any], operation: MPI.Op) -> Traffic | None:
        """What this rank sent, None where nobody counts."""
        if algorithm == "alone":
            return Traffic()
        if algorithm == "native":
            self.synchronise("allreduce")
            for piece in pieces(buffer):
                self._comm.Allreduce(MPI.IN_PLACE, piece, operation)
            return None
        ufunc = ufunc_of(operation)
        if algorithm == "shared":
            assert self._host is not None
            self._host.segments.allreduce(buffer, ufunc)
            return None
        if algorithm == "hierarchical":
            assert self._hierarchy is not None
            return self._hierarchy.allreduce(buffer, ufunc)
        assert self._exchange is not None
        return self._exchange.allreduce(buffer, ufunc, algorithm)

    def _candidates(self) -> tuple[str, ...]:
        """Between two ranks all send the same, recursive doubling in one step in place of two."""
        if self._size == 2:
            return ("recursive-doubling",)
        return _CANDIDATES if self._hierarchy is None else ("hierarchical", *_CANDIDATES)

    def _calibrate(self) -> Choice:
        loads = {name: link_load(name, self._hosts) for name in self._candidates()}

        def run(algorithm: str, size_bytes: int) -> None:
            self._carry_out(algorithm, np.zeros(size_bytes // 4, np.float32), MPI.SUM)

        return calibrate(loads, run, self._agree)

    def _agree(self, value: Any) -> Any:
        """Rank 0's value on all ranks."""
        text = json.dumps(value).encode()
        length = np.array([len(text)], np.int64)
        self._broadcast(length)
        content = np.zeros(int(length[0]), np.uint8)
        if self._rank == 0:
            content[:] = np.frombuffer(text, np.uint8)
        self._broadcast(content)
        return json.loads(content.tobytes())

    def _broadcast(self, array: NDArray[Any]) -> None:
        if not poll(self._comm.Ibcast(array, 0), self._limit_s):
            own = self._names.world_ranks[self._rank]
            raise timed_out("MPI calibration", own, self._limit_s)
