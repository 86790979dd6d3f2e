"""Collectives that move tensors between the ranks of a group.

Non-blocking MPI calls, asked for their end with sleeps in between, by one thread in the same order
on all ranks. Blocking ones spin while they wait for a peer's next part, which on cores that are
not idle costs more than it gains (broadcast of 25 MB between two ranks beside other work: 100 ms,
this way 3 ms), and cannot be given up. Lists have one entry for each rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.transports.mpi.buffers import (
    deal_out,
    joined,
    on_wire,
    parts,
    put_back,
    whole,
)
from paceline.transports.mpi.polling import poll
from paceline.transports.work import timed_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI
    from torch import Tensor

    from paceline.transports.mpi.names import Names
    from paceline.transports.mpi.operations import Reduction


class Exchanges:
    """Among the ranks of `comm`. Each raises TimedOut if it does not end within `limit_s`."""

    def __init__(self, comm: MPI.Intracomm, names: Names, limit_s: float) -> None:
        self._comm = comm
        self._rank = comm.rank
        self._world_rank = names.world_ranks[comm.rank]
        self._limit_s = limit_s

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """The root's tensor on every rank."""
        flat = on_wire(tensor)
        self._end("broadcast", self._comm.Ibcast(whole(flat), root))
        if self._rank != root:
            put_back(flat, tensor)

    def all_gather(self, outputs: Sequence[Tensor], own: Tensor) -> None:
        """Every rank's tensor on every rank; sizes may differ between ranks."""
        mine, lengths = on_wire(own), _lengths(outputs)
        flat = mine.new_empty(sum(lengths))
        self._end("allgather", self._comm.Iallgatherv(whole(mine), parts(flat, lengths)))
        deal_out(flat, outputs)

    def all_gather_single(self, output: Tensor, own: Tensor) -> None:
        """Every rank's tensor, of one size, one after the other in `output`."""
        mine, flat = on_wire(own), on_wire(output)
        shares = parts(flat, [own.numel()] * self._comm.size)
        self._end("allgather", self._comm.Iallgatherv(whole(mine), shares))
        put_back(flat, output)

    def gather(self, outputs: Sequence[Tensor], own: Tensor, root: int) -> None:
        """Every rank's tensor on the root, where alone `outputs` counts; sizes may differ."""
        mine, lengths = on_wire(own), _lengths(outputs)
        flat = mine.new_empty(sum(lengths))
        shares = parts(flat, lengths) if self._rank == root else None
        self._end("gather", self._comm.Igatherv(whole(mine), shares, root))
        if self._rank == root:
            deal_out(flat, outputs)

    def scatter(self, own: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        """The part for each rank of what the root has, where alone `inputs` counts."""
        mine = on_wire(own)
        flat = on_wire(joined(inputs)) if self._rank == root else mine
        shares = parts(flat, _lengths(inputs)) if self._rank == root else None
        self._end("scatter", self._comm.Iscatterv(shares, whole(mine), root))
        put_back(mine, own)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Each rank's part of every rank's inputs; sizes may differ."""
        sent, lengths = on_wire(joined(inputs)), _lengths(outputs)
        flat = sent.new_empty(sum(lengths))
        self._swap("alltoall", flat, lengths, sent, _lengths(inputs))
        deal_out(flat, outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        own: Tensor,
        output_lengths: Sequence[int],
        input_lengths: Sequence[int],
    ) -> None:
        """As all_to_all, of tensors that hold all parts; lengths are in elements."""
        flat = on_wire(output)
        self._swap("alltoall", flat, output_lengths, on_wire(own), input_lengths)
        put_back(flat, output)

    def reduce_scatter(
        self, output: Tensor, inputs: Tensor, lengths: Sequence[int], reduction: Reduction
    ) -> None:
        """This rank's part of the reduction of all ranks' inputs, which are kept.

        inputs: one part for each rank, of `lengths` elements. Each rank gets what the others have
        for it and reduces that itself, in the order of the ranks: no more is sent than in a ring.
        """
        sent, ranks = reduction.begin(inputs), len(lengths)
        flat = sent.new_empty(ranks * lengths[self._rank])
        self._swap("reduce_scatter", flat, [lengths[self._rank]] * ranks, sent, lengths)
        rows = flat.view(ranks, -1)
        for row in rows[1:]:
            reduction.operation.Reduce_local(row.numpy(), rows[0].numpy())
        reduction.end(rows[0], ranks)
        put_back(rows[0], output)

    def _swap(
        self,
        name: str,
        received: Tensor,
        received_lengths: Sequence[int],
        sent: Tensor,
        sent_lengths: Sequence[int],
    ) -> None:
        into = parts(received, received_lengths)
        self._end(name, self._comm.Ialltoallv(parts(sent, sent_lengths), into))

    def _end(self, name: str, request: MPI.Request) -> None:
        if not poll(request, self._limit_s):
            raise timed_out(f"MPI {name}", self._world_rank, self._limit_s)


def _lengths(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]
