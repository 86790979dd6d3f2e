"""Reductions among the ranks of one host through shared memory.

Reduce-scatter and all-gather (Rabenseifner: Optimization of Collective Reduction Operations, 2004)
in chunks that fit in the caches. Two ranks, 25 MB of fp32, idle cores, ms:

    this                                                  3.0
    two barriers a chunk instead of one                   3.6
    the same with a polled MPI_Ibarrier as barrier        3.6
    whole messages copied in, each rank reduces all       3.6
    MPI_Allreduce                                         5.2
    process_vm_readv from the peer's tensor               4.4   (saves a copy, but pins every page)

numpy and torch reduce equally fast. Chunks of half to four times the size, blocks of a quarter, and
spinning for up to 100 µs before the sleep make no difference: the memory is the limit (9 ms on
another AMD EPYC, where both ranks copy the message in 4.7 ms).

Beside a backward pass MPI_Allreduce is not usable: it spins while it waits for its peer, many times
a message, and takes the core from the peer (100 MB in 335 ms). Here ranks sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.collectives.agreement import Agreement, agreement_bytes
from paceline.collectives.buffers import reduce_in_order
from paceline.collectives.errors import TIMED_OUT, EnvironmentLacks, PeerLost, TimedOut
from paceline.collectives.host import host_identity
from paceline.collectives.message_schedules import share_bounds
from paceline.collectives.node.memory import gather
from paceline.collectives.node.semaphores import Barrier
from paceline.collectives.node.shared_node import SharedNode
from paceline.collectives.recorder import GroupDescription
from paceline.collectives.store import GroupStore
from paceline.collectives.torch_internals import PrefixStore, ProcessGroupGloo, Store

# Total over the ranks up to which every rank reduces everything itself, with one barrier instead of
# two: 10 kB take 0.30 ms instead of 0.36 ms (two ranks, median, busy cores, AMD EPYC).
_SHORT_BYTES = 128 * 2**10
SLOTS = 3  # chunks in progress: one is copied in, one reduced, one copied out
_ALIGNMENT = 64  # bytes: a cache line, and a multiple of the size of every number type
_BLOCK_BYTES = 256 * 2**10  # three blocks fit in a core's second-level cache
_LARGEST_AREA_BYTES = 2**20  # one chunk of one rank; half of it costs 5 % of speed, a quarter 40 %
_SIGNAL_BYTES = 2**20  # more than states, semaphores and counters of a group need
_LARGEST_BYTES = 64 * 2**20  # all ranks and all slots

Parts = Mapping[int, NDArray[Any]]  # flat arrays of one type, by the rank that owns them
_Result = TypeVar("_Result")


def segment_bytes(size: int) -> int:
    """Return the shared bytes that `size` ranks need together: about a cache's size for few
    ranks."""
    return SLOTS * size * _area_bytes(size)


def _area_bytes(size: int) -> int:
    """Return the bytes that one rank writes of one chunk."""
    area = min(_LARGEST_AREA_BYTES, _LARGEST_BYTES // SLOTS // size)
    return max(area // _ALIGNMENT, size) * _ALIGNMENT  # no part of an area may be empty


class SharedSegments:
    """Areas of each rank that all ranks of the group read: SLOTS of them, used in turn.

    A message consists of parts, each with a rank that owns it. Parts are processed chunk by chunk,
    see `_run`. All ranks give the same owners and sizes.
    """

    def __init__(
        self, memory: NDArray[np.uint8], rank: int, size: int, synchronise: Callable[[str], None]
    ) -> None:
        """memory: shape (segment_bytes(size),), the same bytes on all ranks.

        synchronise: barrier of all ranks for the operation of the given name. It also makes a
        rank's earlier writes visible to the others.
        """
        self._rank, self._size = rank, size
        self._synchronise = synchronise
        self._areas = memory[: segment_bytes(size)].reshape(SLOTS, size, _area_bytes(size))
        self._turn = 0

    def allreduce(self, buffer: NDArray[Any], ufunc: np.ufunc) -> None:
        """Reduce a flat array over all ranks in place. All ranks get bit-identical results."""
        if buffer.nbytes <= min(_SHORT_BYTES // self._size, self._areas.shape[2]):
            self._reduce_short(buffer, ufunc)
            return
        message = self._message(shares(buffer, self._size))
        reduce = partial(message.reduce, ufunc=ufunc, published=True)
        self._run("allreduce", message, message.copy_in, reduce, message.copy_out)

    def reduce_scatter(self, parts: Parts, ufunc: np.ufunc) -> None:
        """Reduce each part over all ranks, in place on its owner only."""
        message = self._message(parts)
        reduce = partial(message.reduce, ufunc=ufunc, published=False)
        self._run("reduce_scatter", message, message.copy_in, reduce)

    def all_gather(self, parts: Parts) -> None:
        """Copy each part from its owner to all ranks. A single part is a broadcast."""
        message = self._message(parts)
        self._run("allgather", message, message.publish, message.copy_out)

    def gather(self, parts: Parts, root: int) -> None:
        """Copy each part from its owner to the root, which owns none.

        The others give arrays of the same sizes, into which nothing is written.
        """
        message = self._message(parts)
        take = message.copy_out if self._rank == root else _nothing
        self._run("gather", message, message.publish, take)

    def scatter(self, parts: Parts, root: int) -> None:
        """Copy each part from the root to its owner; the same about the others as in `gather`."""
        message = self._message(parts)
        if self._rank == root:
            self._run("scatter", message, message.copy_in, _nothing)
        else:
            self._run("scatter", message, _nothing, partial(message.take, writer=root))

    def _message(self, parts: Parts) -> _Message:
        return _Message(parts, self._rank, self._size, self._areas)

    def _run(self, name: str, message: _Message, *stages: Callable[[int, int], None]) -> None:
        """Run the stages for every chunk, each stage one turn after the one before it.

        An all-reduce copies one chunk in (the parts of other owners), reduces the previous chunk,
        and copies out the results of the chunk before that. A barrier separates the turns. So data
        read in a turn was written before the last barrier, and data overwritten in a turn was read
        before it.
        """
        turns = message.chunks + len(stages) - 1
        for turn in range(turns):
            if turn > 0:
                self._synchronise(name)
            for age, stage in enumerate(stages):
                chunk = turn - age
                if 0 <= chunk < message.chunks:
                    stage(chunk, (self._turn + chunk) % SLOTS)
        self._turn = (self._turn + message.chunks) % SLOTS

    def _reduce_short(self, buffer: NDArray[Any], ufunc: np.ufunc) -> None:
        areas = [area[: buffer.nbytes].view(buffer.dtype) for area in self._areas[self._turn]]
        areas[self._rank][:] = buffer
        self._synchronise("allreduce")
        buffer[:] = areas[0]
        with np.errstate(all="ignore"):  # infinities and NaN are the user's, as in torch
            for area in areas[1:]:
                ufunc(buffer, area, out=buffer)
        self._turn = (self._turn + 1) % SLOTS


def _nothing(_chunk: int, _slot: int) -> None:
    """Take part in a turn in which this rank only waits."""


def shares(buffer: NDArray[Any], owners: int) -> Parts:
    """Divide a flat array among the first ranks, `owners` of them: views of it."""
    bounds = (share_bounds(len(buffer), owner, owners) for owner in range(owners))
    return {owner: buffer[start:stop] for owner, (start, stop) in enumerate(bounds)}


class _Message:
    """Parts and chunks of one message."""

    def __init__(self, parts: Parts, rank: int, size: int, areas: NDArray[np.uint8]) -> None:
        self._rank = rank
        self._size = size
        self._parts = parts
        self._own = parts.get(rank)
        self._others = [owner for owner in parts if owner != rank]
        self._itemsize = next(iter(parts.values())).itemsize
        # an owner's part of a chunk, in bytes of an area
        self._part_bytes = areas.shape[2] // len(parts) // _ALIGNMENT * _ALIGNMENT
        self._starts = {owner: place * self._part_bytes for place, owner in enumerate(parts)}
        self._length = self._part_bytes // self._itemsize
        self._areas = areas
        self.chunks = -(-max(map(len, parts.values())) // self._length)

    def copy_in(self, chunk: int, slot: int) -> None:
        for owner in self._others:
            own = self._chunk(self._parts[owner], chunk)
            self._area(slot, self._rank, owner, own)[:] = own

    def reduce(self, chunk: int, slot: int, ufunc: np.ufunc, *, published: bool) -> None:
        """Reduce block by block, so that each block stays in the cache. published: the result is
        copied out later."""
        if self._own is None:
            return
        own = self._chunk(self._own, chunk)
        others = {
            peer: self._area(slot, peer, self._rank, own)
            for peer in range(self._size)
            if peer != self._rank
        }
        result = self._area(slot, self._rank, self._rank, own)
        length = _BLOCK_BYTES // self._itemsize
        for start in range(0, len(own), length):
            block = slice(start, start + length)
            blocks = {peer: other[block] for peer, other in others.items()}
            reduce_in_order(own[block], self._rank, blocks, ufunc)
            if published:
                result[block] = own[block]

    def publish(self, chunk: int, slot: int) -> None:
        if self._own is not None:
            own = self._chunk(self._own, chunk)
            self._area(slot, self._rank, self._rank, own)[:] = own

    def copy_out(self, chunk: int, slot: int) -> None:
        for owner in self._others:
            part = self._chunk(self._parts[owner], chunk)
            part[:] = self._area(slot, owner, owner, part)

    def take(self, chunk: int, slot: int, writer: int) -> None:
        """Copy the own part as `writer` has copied it in."""
        assert self._own is not None, "every rank but the writer owns a part"
        own = self._chunk(self._own, chunk)
        own[:] = self._area(slot, writer, self._rank, own)

    def _chunk(self, part: NDArray[Any], chunk: int) -> NDArray[Any]:
        return part[chunk * self._length : (chunk + 1) * self._length]

    def _area(self, slot: int, writer: int, owner: int, like: NDArray[Any]) -> NDArray[Any]:
        """Return the memory into which `writer` writes `owner`'s part, as an array like `like`."""
        start = self._starts[owner]
        area = self._areas[slot, writer, start : start + like.nbytes]
        return area.view(like.dtype)


class HostGroup:
    """The ranks of a group that run on this host."""

    def __init__(
        self,
        library: str,
        members: Sequence[int],
        rank: int,
        world_ranks: Sequence[int],
        store: Store,
        limit_s: float,
    ) -> None:
        """Construct; collective over `members`, which are ranks of the group like `rank`.

        library: name for messages. world_ranks: by rank of the group. store: used by this group
        only.

        Raises EnvironmentLacks on all members if they cannot share memory, TimedOut if a member
        does not take part.
        """
        local_rank, size = members.index(rank), len(members)
        share = GroupStore(
            store, local_rank, size, prefix=f"host of rank {world_ranks[members[0]]}"
        )
        names = [f"rank {world_ranks[member]}" for member in members]
        sizes = [segment_bytes(size), agreement_bytes(size)]
        self._node = SharedNode(share, limit_s, names, sum(sizes) + _SIGNAL_BYTES)
        place = f"{names[local_rank]}: {library}"
        barrier = partial(_synchronise, self._node.barrier(range(size)), place)
        memory, records = self._node.memories("all-reduce", sizes)
        self.agreement = Agreement(records, local_rank, names, barrier)
        self.synchronise = self.agreement.synchronise
        self.segments = SharedSegments(memory, local_rank, size, self.synchronise)

    def limit_waits(self, limit_s: float) -> None:
        """Limit each wait from now on."""
        self._node.limit_waits(limit_s)

    def fail(self) -> None:
        """Let the members that wait, now or later, get PeerLost instead of a time-out."""
        self._node.fail()

    def close(self, loss: str = "") -> None:
        """Leave. loss: of another rank, if that is the reason."""
        self._node.close(loss=loss)


def open_host_group(
    library: str,
    hosts: Sequence[object],
    rank: int,
    world_ranks: Sequence[int],
    store: Store,
    limit_s: float,
    gather: Callable[[str], list[str]],
) -> HostGroup | None:
    """Return the ranks of this host, None for a single one; collective over all hosts.

    hosts: by rank of the group. gather: returns the texts of all ranks. Others: see HostGroup.
    Raises EnvironmentLacks on all ranks if those of a host cannot share memory; across containers,
    for example, they do not.
    """
    members = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    found: HostGroup | None = None
    reason = ""
    try:
        if len(members) > 1:
            found = HostGroup(library, members, rank, world_ranks, store, limit_s)
    except EnvironmentLacks as error:
        reason = str(error)
    reasons = [each for each in gather(reason) if each]
    if reasons:
        if found is not None:
            found.close()
        raise EnvironmentLacks(reasons[0])
    return found


class Leaders:
    """Ranks that exchange between hosts what each host has reduced in its memory.

    A message is divided among as many leaders per host as the smallest host has ranks. Each leader
    reduces its part for its host, exchanges it with the leaders of the same part, and shares the
    result on its host: 2 (H-1)/H of the message leave each of H hosts, however many ranks it has.
    """

    def __init__(self, hosts: Sequence[object], rank: int) -> None:
        """hosts: by rank. rank: this one."""
        self.local_rank = list(hosts[:rank]).count(hosts[rank])
        self._count = min(list(hosts).count(host) for host in hosts)

    @property
    def include_this_rank(self) -> bool:
        return self.local_rank < self._count

    def allreduce(
        self,
        buffer: NDArray[Any],
        ufunc: np.ufunc,
        group: HostGroup | None,
        exchange: Callable[[NDArray[Any], np.ufunc], _Result],
    ) -> _Result | None:
        """Reduce a flat array over all ranks in place; all ranks get bit-identical results.

        group: of this host; None for a single rank. exchange: reduces the part of a leader over the
        hosts, in place. Return what it returned; None on other ranks.
        """
        parts = shares(buffer, self._count)
        if group is not None:
            group.segments.reduce_scatter(parts, ufunc)
        result: _Result | None = None
        if self.include_this_rank:
            result = exchange(parts[self.local_rank], ufunc)
        if group is not None:
            group.segments.all_gather(parts)
        return result


def _synchronise(barrier: Barrier, place: str, name: str) -> None:
    """Wait, asleep, until all members have reached operation `name`.

    place: this rank and its library. Raises TimedOut, or PeerLost if a member died; both name the
    operation.
    """
    try:
        barrier.wait()
    except TimedOut as error:
        raise TimedOut(f"{place} {name}: {error}") from error
    except PeerLost as error:
        raise PeerLost(f"{place} {name}: {error}", error.rank, loss=error.loss) from error


# Collectives in two levels: shared memory within each host, Gloo between the leaders of hosts

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


class NothingToShare(EnvironmentLacks):
    """No two ranks of a group are on one host."""


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
            raise NothingToShare("each rank is on a host of its own")
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

    def begin(self, call: str, limit_s: float) -> None:
        """Announce to the ranks of this host what this rank calls, in words; each wait has this
        limit."""
        if self._host is not None:  # None: the only rank of its host
            self._host.limit_waits(limit_s)
            self._host.agreement.begin(call)

    def agree(self, name: str) -> None:
        """Compare what the ranks of this host call, unless the call has done so.

        name: of the operation. Raises CallsDiffer on all of them if they call different things.
        """
        if self._host is not None:
            self._host.agreement.end(name)

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
