"""All-reduce over one group of ranks, with the algorithm that suits their placement.

Between hosts with several ranks it is hierarchical: within each host through shared memory, between
hosts once per host.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from paceline.collectives.errors import EnvironmentLacks, TimedOut
from paceline.collectives.message_schedules import Algorithm, chunks
from paceline.collectives.mpi.message_collectives import (
    Hierarchy,
    Meeting,
    MessageCollectives,
    Traffic,
)
from paceline.collectives.mpi.world import RankNames, complete, poll_until
from paceline.collectives.recorder import GroupDescription
from paceline.collectives.shared_memory import HostGroup, open_host_group
from paceline.collectives.torch_internals import Store

# Choose an all-reduce algorithm for each message size from about one second of measurements
#
# All ranks follow the decisions of rank 0.

BUDGET_S = 1.0
_SIZES_BYTES = (4 * 2**10, 64 * 2**10, 512 * 2**10, 4 * 2**20, 16 * 2**20)
_REPEATS = 2
_DECIDED_BYTES = tuple(2**power for power in range(10, 29))  # 1 KiB to 256 MiB
_WORTHWHILE = 0.97  # a change of algorithm must gain more than noise


@dataclass(slots=True)
class Curve:
    """Measured seconds by message size, in ascending order of the sizes."""

    bytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def at(self, size_bytes: int) -> float:
        """Interpolate linearly between sizes; constant below the smallest, proportional to the size
        beyond the largest.

        The budget ends a calibration early only where messages are so slow that the largest
        measured one already shows the time per byte.
        """
        if size_bytes > self.bytes[-1]:
            return self.seconds[-1] * size_bytes / self.bytes[-1]
        return float(np.interp(size_bytes, self.bytes, self.seconds))


@dataclass(frozen=True, slots=True)
class Bin:
    """The algorithm of messages of up to this many bytes; None means any size."""

    up_to_bytes: int | None
    algorithm: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Measurements of rank 0, and the decision that all ranks follow."""

    bins: tuple[Bin, ...]
    curves: dict[str, Curve]
    took_s: float

    def algorithm_for(self, size_bytes: int) -> str:
        return next(
            choice.algorithm
            for choice in self.bins
            if choice.up_to_bytes is None or size_bytes <= choice.up_to_bytes
        )


def decide(curves: dict[str, Curve]) -> tuple[Bin, ...]:
    """Return the fastest algorithm by message size, changed only where the gain exceeds noise."""
    winners: list[str] = []
    for size in _DECIDED_BYTES:
        seconds = {name: curve.at(size) for name, curve in curves.items()}
        best = min(seconds, key=lambda name: seconds[name])
        if winners and seconds[best] > seconds[winners[-1]] * _WORTHWHILE:
            best = winners[-1]
        winners.append(best)
    bins = []
    for algorithm, run in groupby(zip(_DECIDED_BYTES, winners, strict=True), lambda pair: pair[1]):
        largest = [size for size, _ in run][-1]
        # the geometric mean of two powers of two
        bins.append(Bin(int(largest * math.sqrt(2)), algorithm))
    bins[-1] = Bin(None, bins[-1].algorithm)
    return tuple(bins)


def calibrate(
    algorithms: Sequence[str],
    run: Callable[[str, int], None],
    agree: Callable[[Any], Any],
    clock: Callable[[], float] = time.perf_counter,
) -> Choice:
    """Measure the algorithms at increasing sizes within the time budget; collective.

    run: performs an all-reduce of the given bytes with the given algorithm. It cannot end on one
    rank before the last rank has started, so rank 0's time is representative. agree: returns rank
    0's value on all ranks. A single algorithm is not measured.
    """
    if len(algorithms) == 1:
        return Choice((Bin(None, algorithms[0]),), {}, 0.0)
    started = clock()
    curves = {name: Curve() for name in algorithms}
    for name in algorithms:
        run(name, _SIZES_BYTES[0])  # opens connections and fills caches
    for size in _SIZES_BYTES:
        measured: dict[str, float] = {}
        for name, curve in curves.items():
            expected = _REPEATS * curve.at(size) if curve.bytes else 0.0
            if curve.bytes and not agree(clock() - started + expected <= BUDGET_S):
                break
            measured[name] = min(_timed(name, size, run, clock) for _ in range(_REPEATS))
        if len(measured) < len(curves):
            break
        for name, seconds in measured.items():
            curves[name].bytes.append(size)
            curves[name].seconds.append(seconds)
    choice: Choice = agree(Choice(decide(curves), curves, clock() - started))
    return choice


def _timed(
    name: str, size: int, run: Callable[[str, int], None], clock: Callable[[], float]
) -> float:
    started = clock()
    run(name, size)
    return clock() - started


def of_rank_0(value: Any, comm: MPI.Intracomm, world_rank: int, limit_s: float) -> Any:
    """Return rank 0's value on all ranks; collective. Raises TimedOut.

    mpi4py's own bcast of an object spins, and cannot be given up.
    """
    text = MPI.pickle.dumps(value)
    length = np.array([len(text)], np.int64)
    complete(comm.Ibcast(length, 0), "calibration", world_rank, limit_s)
    content = np.zeros(int(length[0]), np.uint8)
    if comm.rank == 0:
        content[:] = np.frombuffer(text, np.uint8)
    complete(comm.Ibcast(content, 0), "calibration", world_rank, limit_s)
    return MPI.pickle.loads(content.tobytes())


# MPI's own all-reduce is not a candidate: it spins on cores that are busy (with two ranks on each
# core 25 MB took 12 s instead of 0.4 s) and cannot be given up. The papers' two are too slow.
_CANDIDATES = ("recursive-doubling", "ring", "rabenseifner")

# Open MPI's Allreduce allocates a temporary as large as the message. In chunks that fit the caches,
# 25 MB take 5 ms instead of 26 to 35 ms (two ranks in shared memory, AMD EPYC).
_NATIVE_BYTES = 4 * 2**20
_NATIVE_OPERATIONS = {
    np.add: MPI.SUM,
    np.multiply: MPI.PROD,
    np.minimum: MPI.MIN,
    np.maximum: MPI.MAX,
    np.bitwise_and: MPI.BAND,
    np.bitwise_or: MPI.BOR,
    np.bitwise_xor: MPI.BXOR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveStatistics:
    """Algorithm and traffic of an all-reduce on this rank."""

    algorithm: str
    sent_bytes: int | None = None  # None if not counted: MPI's own all-reduce and shared memory
    sent_messages: int | None = None


class AllReduce:
    """All-reduce among the ranks of `comm`. One thread calls it, in the same order on all ranks."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        names: RankNames,
        store: Store,
        limit_s: float,
        algorithm: Algorithm,
    ) -> None:
        """Construct; collective. names: names of the ranks of `comm`. store: used by this group
        only. limit_s: limit of every wait.

        algorithm: "auto" means shared memory on one host. Otherwise, or if memory cannot be shared,
        a calibration decides: in the constructor if the group is the whole world, else at the first
        message.
        """
        self._comm = comm
        self._rank, self._size = comm.rank, comm.size
        self._names = names
        self._limit_s = limit_s
        self._requested = algorithm
        self._hosts = hosts_of(comm)
        self._host_count = len(set(self._hosts))
        self._world_rank = names.world_ranks[comm.rank]
        self._host_group: HostGroup | None = None
        self._meeting: Meeting | None = None  # of the ranks, until they have compared their calls
        self._reason_not_shared: str | None = None
        self._hierarchy: Hierarchy | None = None
        self._messages: MessageCollectives | None = None
        self._messages_comm = MPI.COMM_NULL
        self._choice: Choice | None = None
        self._algorithm = self._prepare(store)
        if self._algorithm == "auto" and self._size == MPI.COMM_WORLD.size:
            self._choice = self._calibrate()

    def allreduce(self, buffer: NDArray[Any], ufunc: np.ufunc) -> CollectiveStatistics:
        """Reduce a flat array over all ranks in place; all ranks get bit-identical results.

        Raises TimedOut if a peer does not take part within the limit, PeerLost if a peer died.
        """
        algorithm = self._algorithm
        if algorithm == "auto":
            if self._choice is None:
                self._choice = self._calibrate()
            algorithm = self._choice.algorithm_for(buffer.nbytes)
        traffic = self._carry_out(algorithm, buffer, ufunc)
        if traffic is None:
            return CollectiveStatistics(algorithm=algorithm)
        return CollectiveStatistics(
            algorithm=algorithm, sent_bytes=traffic.bytes, sent_messages=traffic.messages
        )

    def begin(self, name: str, call: str, *, must_wait: bool) -> None:
        """Begin operation `name`, which this rank calls in words that are the same on all ranks.

        must_wait: wait until every rank has reached it; see GroupCore._submit. Raises CallsDiffer
        on all ranks if they call different things; without a wait, that may be found later, while
        messages are under way or by `end`.
        """
        if (group := self._whole_group()) is not None:
            group.agreement.begin(call)
            if must_wait:
                group.synchronise(name)
            return
        self._meeting = Meeting(self._comm, call, self._names)
        if must_wait or self._algorithm == "native":  # which cannot be given up
            complete(self._meeting.request, name, self._world_rank, self._limit_s)
            self._check()

    def end(self, name: str, error: Exception | None = None) -> None:
        """End an operation, with the error that this rank has got.

        Raises CallsDiffer if the ranks have called different things, of which the error comes.
        """
        if (group := self._whole_group()) is not None:
            if error is None:
                group.agreement.end(name)
        elif (meeting := self._meeting) is not None:
            if error is None:
                complete(meeting.request, name, self._world_rank, self._limit_s)
            else:  # after a time-out, what has come counts; otherwise a peer may still come
                limit_s = 0.0 if isinstance(error, TimedOut) else self._limit_s
                poll_until(meeting.request.Test, limit_s)
            self._check(error)

    def _check(self, reason: Exception | None = None) -> None:
        """Raise CallsDiffer if all ranks have said what they call, and it differs."""
        if self._meeting is not None and self._meeting.request.Test():
            meeting, self._meeting = self._meeting, None
            meeting.compare(reason)

    def _whole_group(self) -> HostGroup | None:
        """Return the ranks of this host if they share memory and are all."""
        return self._host_group if self._host_count == 1 else None

    def describe(self) -> GroupDescription:
        """Return which algorithm reduces messages of which size, for the records."""
        described: GroupDescription = {"algorithm": self._algorithm, "hosts": self._host_count}
        if self._reason_not_shared is not None:
            described["not_shared"] = self._reason_not_shared
        if self._choice is not None:
            described["by_size"] = [asdict(choice) for choice in self._choice.bins]
            described["calibration_s"] = {
                name: dict(zip(map(str, curve.bytes), curve.seconds, strict=True))
                for name, curve in self._choice.curves.items()
            }
            described["calibration_took_s"] = self._choice.took_s
        return described

    def close(self) -> None:
        """Free what is shared; collective."""
        if self._host_group is not None:
            self._host_group.close()
            self._host_group = None
        if self._hierarchy is not None:
            self._hierarchy.close()
            self._hierarchy = None
        if self._messages is not None:
            self._messages_comm.Free()
            self._messages = None

    def _prepare(self, store: Store) -> str:
        """Create what the requested algorithm needs, and return the algorithm that is used."""
        algorithm = self._requested
        if self._size == 1:
            return "alone"
        hosts = self._host_count
        levels = hosts < self._size or algorithm == "hierarchical"
        if algorithm in {"auto", "hierarchical"} and levels and self._share_memory(store):
            if hosts == 1:
                return "shared"
            self._hierarchy = Hierarchy(
                self._comm, self._hosts, self._host_group, self._limit_s, self._check
            )
        if algorithm == "hierarchical" and self._hierarchy is None:
            algorithm = "auto"
        if algorithm not in {"native", "hierarchical"}:
            self._messages_comm = self._comm.Dup()
            self._messages = MessageCollectives(
                self._messages_comm, self._names, self._limit_s, self._check
            )
        return algorithm

    def _share_memory(self, store: Store) -> bool:
        """Return whether the ranks of every host share memory."""
        try:
            self._host_group = open_host_group(
                "MPI", self._hosts, self._rank, self._names.world_ranks, store, self._limit_s,
                self._comm.allgather,
            )  # fmt: skip
        except EnvironmentLacks as error:
            self._reason_not_shared = str(error)
            return False
        return True

    def _carry_out(self, algorithm: str, buffer: NDArray[Any], ufunc: np.ufunc) -> Traffic | None:
        """Run one all-reduce and return what this rank sent, or None if that is not counted."""
        if algorithm == "alone":
            return Traffic()
        if algorithm == "native":
            for span in chunks(len(buffer), _NATIVE_BYTES // buffer.itemsize):
                operation = _NATIVE_OPERATIONS[ufunc]
                self._comm.Allreduce(MPI.IN_PLACE, buffer[span.slice], operation)
            return None
        if algorithm == "shared":
            assert self._host_group is not None
            self._host_group.segments.allreduce(buffer, ufunc)
            return None
        if algorithm == "hierarchical":
            assert self._hierarchy is not None
            return self._hierarchy.allreduce(buffer, ufunc)
        assert self._messages is not None
        return self._messages.allreduce(buffer, ufunc, algorithm)

    def _candidates(self) -> tuple[str, ...]:
        """Return the algorithms to calibrate. Between two ranks all send the same volume, and
        recursive doubling needs one step instead of two."""
        if self._size == 2:
            return ("recursive-doubling",)
        return _CANDIDATES if self._hierarchy is None else ("hierarchical", *_CANDIDATES)

    def _calibrate(self) -> Choice:
        def run(algorithm: str, size_bytes: int) -> None:
            self._carry_out(algorithm, np.zeros(size_bytes // 4, np.float32), np.add)

        return calibrate(self._candidates(), run, self._agree)

    def _agree(self, value: Any) -> Any:
        """Return rank 0's value on all ranks."""
        return of_rank_0(value, self._comm, self._world_rank, self._limit_s)


def combined_statistics(parts: Sequence[CollectiveStatistics]) -> CollectiveStatistics | None:
    """Combine the statistics of several all-reduces into those of one operation."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    return CollectiveStatistics(
        algorithm=", ".join(dict.fromkeys(part.algorithm for part in parts)),
        sent_bytes=_total([part.sent_bytes for part in parts]),
        sent_messages=_total([part.sent_messages for part in parts]),
    )


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def hosts_of(comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return for each rank the lowest rank on its host with which it can share memory;
    collective."""
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        lowest = local.allreduce(comm.rank, MPI.MIN)
    finally:
        local.Free()
    return tuple(comm.allgather(lowest))
