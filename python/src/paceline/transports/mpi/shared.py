"""Reductions among ranks of one host, through memory that they share.

Reduce-scatter and all-gather (Rabenseifner: Optimization of Collective Reduction Operations, 2004)
in pieces that stay in the caches. Two ranks, 25 MB of fp32, nothing else on their cores, ms:

    this                                                3.0
    two meetings a piece in place of one                3.6
    the same, meeting by a polled MPI_Ibarrier          3.6
    whole messages copied in, each rank reduces all     3.6
    MPI_Allreduce                                       5.2
    process_vm_readv straight from the peer's tensor    4.4   (saves a copy, but pins every page)

What reduces, numpy or torch, makes no difference, nor do pieces twice as long. Beside a backward
pass MPI_Allreduce is out of the question: it spins while it waits for its peer, many times a
message, and what spins takes the core from the other (100 MB in 335 ms). Here ranks sleep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.plan.schedule import share_bounds
from paceline.transports.mpi.algorithms.arithmetic import reduce_in_order

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

SLOTS = 3  # a piece is copied in, reduced, copied out: three pieces are under way
SHORT_BYTES = 128 * 2**10  # up to this over the ranks, every rank reduces everything for itself
_ALIGNMENT = 64  # bytes: a cache line, and a multiple of every number's size
_BLOCK_BYTES = 256 * 2**10  # three of them stay in a core's second-level cache
_LARGEST_AREA_BYTES = 2**20  # of one rank, one piece; half as much costs 5 %, a quarter 40 %
_LARGEST_BYTES = 64 * 2**20  # of all ranks, all slots


def segment_bytes(size: int) -> int:
    """Of the memory that `size` ranks need together: about a cache's size if they are few."""
    return SLOTS * size * _area_bytes(size)


def _area_bytes(size: int) -> int:
    """Of what one rank writes of one piece."""
    area = min(_LARGEST_AREA_BYTES, _LARGEST_BYTES // SLOTS // size)
    return max(area // _ALIGNMENT, size) * _ALIGNMENT  # no part of it may be empty


class SharedSegments:
    """Areas of each rank that all ranks of the group read, SLOTS of them, used in turn.

    A message is dealt out among `owners`, the first ranks: each reduces its share for all. The
    shares are carried piece by piece. In every turn a rank copies one piece in (the others' parts
    of it), reduces the piece before, and copies out what the others have made of the one before
    that; then it meets the others. So what a turn reads was written before the last meeting, and
    what it overwrites was read before it.
    """

    def __init__(
        self, memory: NDArray[np.uint8], rank: int, size: int, synchronise: Callable[[], None]
    ) -> None:
        """memory: shape (segment_bytes(size),), the same bytes on all ranks.

        meet: returns when all ranks have called it, or raises. What a rank wrote before, the others
        see after it.
        """
        self._rank, self._size = rank, size
        self._synchronise = synchronise
        self._areas = memory[: segment_bytes(size)].reshape(SLOTS, size, _area_bytes(size))
        self._turn = 0

    def allreduce(self, buffer: NDArray[Any], ufunc: np.ufunc) -> None:
        """Reduce a flat array over all ranks, in place. Every rank gets the very same bits."""
        if buffer.nbytes <= min(SHORT_BYTES // self._size, self._areas.shape[2]):
            self._reduce_short(buffer, ufunc)
            return
        message = _Message(buffer, self._rank, self._size, self._size, self._areas)
        first, count = self._turn, message.pieces
        for turn in range(count + 2):
            slots = [(first + turn - age) % SLOTS for age in range(SLOTS)]
            if turn < count:
                message.copy_in(turn, slots[0])
            if 1 <= turn <= count:
                message.reduce(turn - 1, slots[1], ufunc, published=True)
            if turn >= 2:
                message.copy_out(turn - 2, slots[2])
            if turn <= count:
                self._synchronise()
        self._turn = (first + count) % SLOTS

    def reduce_scatter(self, buffer: NDArray[Any], ufunc: np.ufunc, owners: int) -> None:
        """Reduce over all ranks what each owner owns, in place there; see `owned`."""
        message = _Message(buffer, self._rank, self._size, owners, self._areas)
        for turn in range(message.pieces + 1):
            if turn < message.pieces:
                message.copy_in(turn, (self._turn + turn) % SLOTS)
            if turn >= 1:
                slot = (self._turn + turn - 1) % SLOTS
                message.reduce(turn - 1, slot, ufunc, published=False)
            self._synchronise()
        self._turn = (self._turn + message.pieces) % SLOTS

    def all_gather(self, buffer: NDArray[Any], owners: int) -> None:
        """Copy what each owner owns to all ranks."""
        message = _Message(buffer, self._rank, self._size, owners, self._areas)
        for turn in range(message.pieces + 1):
            if turn < message.pieces:
                message.publish(turn, (self._turn + turn) % SLOTS)
            if turn >= 1:
                message.copy_out(turn - 1, (self._turn + turn - 1) % SLOTS)
            self._synchronise()
        self._turn = (self._turn + message.pieces) % SLOTS

    def _reduce_short(self, buffer: NDArray[Any], ufunc: np.ufunc) -> None:
        areas = [area[: buffer.nbytes].view(buffer.dtype) for area in self._areas[self._turn]]
        areas[self._rank][:] = buffer
        self._synchronise()
        buffer[:] = areas[0]
        for area in areas[1:]:
            ufunc(buffer, area, out=buffer)
        self._turn = (self._turn + 1) % SLOTS


def owned(length: int, rank: int, owners: int) -> slice:
    """The elements of a message that local rank `rank` owns: none for those beyond `owners`."""
    return slice(*(share_bounds(length, rank, owners) if rank < owners else (length, length)))


class _Message:
    """One message's shares and pieces, and what becomes of them."""

    def __init__(
        self,
        buffer: NDArray[Any],
        rank: int,
        size: int,
        owners: int,
        areas: NDArray[np.uint8],
    ) -> None:
        self._rank = rank
        self._size = size
        self._buffer = buffer
        self._owners = [owner for owner in range(owners) if owner != rank]
        self._owns = rank < owners
        self._shares = [owned(len(buffer), owner, owners) for owner in range(owners)]
        # of an area, an owner's part of a piece
        self._part_bytes = areas.shape[2] // owners // _ALIGNMENT * _ALIGNMENT
        self._length = self._part_bytes // buffer.itemsize
        self._areas = areas
        longest = self._shares[0].stop
        self.pieces = -(-longest // self._length)

    def copy_in(self, piece: int, slot: int) -> None:
        for owner in self._owners:
            own = self._part(piece, owner)
            self._area(slot, self._rank, owner, len(own))[:] = own

    def reduce(self, piece: int, slot: int, ufunc: np.ufunc, *, published: bool) -> None:
        """Block by block, so that each stays in the cache. published: to be copied out."""
        if not self._owns:
            return
        own = self._part(piece, self._rank)
        others = {
            peer: self._area(slot, peer, self._rank, len(own))
            for peer in range(self._size)
            if peer != self._rank
        }
        result = self._area(slot, self._rank, self._rank, len(own))
        length = _BLOCK_BYTES // own.itemsize
        for start in range(0, len(own), length):
            block = slice(start, start + length)
            blocks = {peer: other[block] for peer, other in others.items()}
            reduce_in_order(own[block], self._rank, blocks, ufunc)
            if published:
                result[block] = own[block]

    def publish(self, piece: int, slot: int) -> None:
        if self._owns:
            own = self._part(piece, self._rank)
            self._area(slot, self._rank, self._rank, len(own))[:] = own

    def copy_out(self, piece: int, slot: int) -> None:
        for owner in self._owners:
            own = self._part(piece, owner)
            own[:] = self._area(slot, owner, owner, len(own))

    def _part(self, piece: int, owner: int) -> NDArray[Any]:
        share = self._shares[owner]
        start = min(share.start + piece * self._length, share.stop)
        return self._buffer[start : min(start + self._length, share.stop)]

    def _area(self, slot: int, writer: int, owner: int, length: int) -> NDArray[Any]:
        """What `writer` writes of `owner`'s part."""
        start = owner * self._part_bytes
        area = self._areas[slot, writer, start : start + length * self._buffer.itemsize]
        return area.view(self._buffer.dtype)
