"""torch's ProcessGroup over an MPI communicator of its own.

Collectives go through one progress thread in the order of submission, as MPI demands of every
rank. Messages between two ranks are non-blocking calls on a second communicator, so that a send
never stands in the way of the receive that its peer needs first.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from mpi4py import MPI

from paceline.data.node import MemoryUse
from paceline.train.collectives.mpi.buffers import (
    as_bytes,
    divide,
    is_average,
    operation_of,
    pieces,
    reducible,
)
from paceline.train.collectives.mpi.messages import MpiMessage
from paceline.train.collectives.mpi.reductions import Reductions
from paceline.train.collectives.progress import ProgressThread
from paceline.train.collectives.recorder import arrive, payload_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from paceline.errors import PacelineError
    from paceline.spec.values import Algorithm
    from paceline.train.collectives.work import PendingWork

BACKEND = "mpi4py"
_LARGEST_TAG = 32767  # what the MPI standard guarantees for MPI_TAG_UB
_CLOSE_LIMIT_S = 10.0
_USE = MemoryUse("the ranks' shared segments", 'use transport "gloo"')
_ABORT_LIMIT_S = 0.5


# Untyped here: torch declares overloads of which a backend implements the one with lists.
_ProcessGroup: Any = dist.ProcessGroup


class MpiProcessGroup(_ProcessGroup):  # type: ignore[misc]  # subclasses Any, see above
    """A group of ranks of MPI_COMM_WORLD; making it is collective over the group.

    world_ranks: ranks in MPI's world, in the group's order; empty means all.
    store: of this group alone; where the ranks tell one another of memory that they share.
    algorithm: of all-reduce, where it matters.
    limit_s: of every operation, from when it is this rank's turn to carry it out.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        world_ranks: list[int],
        name: str,
        limit_s: float,
        store: Store,
        algorithm: Algorithm = "auto",
    ) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._name = name
        self._limit_s = limit_s
        self._store = store
        self._algorithm = algorithm
        self._progress = ProgressThread("MPI", rank, limit_s, name)
        self._open = True
        self._reductions: Reductions
        self._comm = MPI.COMM_NULL
        self._messages = MPI.COMM_NULL
        members = world_ranks or list(range(size))
        self._progress.submit("communicator", lambda: self._make_communicators(members), [])
        self.barrier().wait()

    @property
    def failure(self) -> PacelineError | None:
        """The first error of this group; after it every operation fails."""
        return self._progress.failure

    # -- what torch asks of a group ------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return BACKEND

    def setGroupName(self, group_name: str) -> None:  # noqa: N802  (torch's name)
        self._name = group_name

    def getGroupName(self) -> str:  # noqa: N802  (torch's name)
        return self._name

    @property
    def group_name(self) -> str:
        """The base class has no place for the name of a group that is its own backend."""
        return self._name

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def shutdown(self) -> None:
        """End the threads and, if nothing failed, free the communicators (collective)."""
        if self._open and self.failure is None:
            self._submit("shutdown", self._free_communicators, [])
        self._close(_CLOSE_LIMIT_S)

    def abort(self) -> None:
        """End the threads without the peers; one that MPI holds is left behind."""
        self._close(_ABORT_LIMIT_S)

    # -- collectives ---------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> PendingWork:
        """Reduce each tensor over all ranks, in place."""
        reduce_op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        operations = [operation_of(reduce_op, t.dtype) for t in tensors]

        def call() -> None:
            for tensor, operation in zip(tensors, operations, strict=True):
                self._reduce_over_all(tensor, operation, average=is_average(reduce_op))

        return self._submit("allreduce", call, tensors, meet=False)  # the reductions meet

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> PendingWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> PendingWork:
        """Reduce onto `opts.rootRank`; the other ranks' tensors stay as they are."""
        operation = operation_of(opts.reduceOp, tensors[0].dtype)
        root: int = opts.rootRank

        def call() -> None:
            with reducible(tensors[0]) as buffer:
                for piece in pieces(buffer.numpy()):
                    if self._rank == root:
                        self._comm.Reduce(MPI.IN_PLACE, piece, operation, root)
                    else:
                        self._comm.Reduce(piece, None, operation, root)
                if is_average(opts.reduceOp) and self._rank == root:
                    divide(buffer, self._size)

        return self._submit("reduce", call, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> PendingWork:
        root: int = opts.rootRank if opts is not None else 0

        def call() -> None:
            for tensor in tensors:
                self._send_to_all(tensor, root)

        return self._submit("broadcast", call, tensors)

    def allgather(
        self,
        output_tensors: list[list[Tensor]],
        input_tensors: list[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> PendingWork:
        """Every rank's tensor on every rank; shapes may differ between ranks."""

        def call() -> None:
            for outputs, own in zip(output_tensors, input_tensors, strict=True):
                outputs[self._rank].detach().copy_(own)
                for root, output in enumerate(outputs):
                    self._send_to_all(output, root)

        return self._submit("allgather", call, output_tensors)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> PendingWork:
        """Every rank's tensor one after the other in `output`."""
        parts = [p.view(own.shape) for p in output.view(-1).chunk(self._size)]
        return self.allgather([parts], [own], opts)

    _allgather_base = all_gather_single  # the name before torch 2.13

    def gather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any
    ) -> PendingWork:
        """Every rank's tensor on `opts.rootRank`."""
        root: int = opts.rootRank
        own = input_tensors[0]

        def call() -> None:
            if self._rank != root:
                self._send_to(own, root)
                return
            for source, output in enumerate(output_tensors[0]):
                if source == root:
                    output.detach().copy_(own)
                else:
                    self._receive_from(output, source)

        return self._submit("gather", call, output_tensors)

    def scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any
    ) -> PendingWork:
        """The parts that `opts.rootRank` has, one for each rank."""
        root: int = opts.rootRank
        own = output_tensors[0]

        def call() -> None:
            if self._rank != root:
                self._receive_from(own, root)
                return
            for target, part in enumerate(input_tensors[0]):
                if target == root:
                    own.detach().copy_(part)
                else:
                    self._send_to(part, target)

        return self._submit("scatter", call, output_tensors)

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any
    ) -> PendingWork:
        """Each rank's part of the reduction of all ranks' lists; the inputs are kept."""
        parts = [part.clone() for part in input_tensors[0]]
        operations = [operation_of(opts.reduceOp, part.dtype) for part in parts]

        def call() -> None:
            for root, (part, operation) in enumerate(zip(parts, operations, strict=True)):
                self._reduce_over_all(part, operation, average=is_average(opts.reduceOp))
                if root == self._rank:
                    output_tensors[0].detach().copy_(part)

        return self._submit("reduce_scatter", call, output_tensors)

    def barrier(self, opts: Any = None) -> PendingWork:  # noqa: ARG002
        return self._submit("barrier", lambda: None, [])  # to meet is all

    # -- messages between two ranks ------------------------------------------------------------

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> MpiMessage:
        (tensor,) = tensors
        with as_bytes(tensor, written=False) as data:
            request = self._messages.Isend(data, destination, tag % _LARGEST_TAG)
        return MpiMessage("send", self._rank, self._limit_s, tensors, request, data)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> MpiMessage:
        (tensor,) = tensors
        target = tensor.detach().contiguous()  # the tensor itself if it is contiguous
        with as_bytes(target, written=False) as data:
            request = self._messages.Irecv(data, source, tag % _LARGEST_TAG)

        def deliver() -> None:
            if target.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(target)

        return MpiMessage("recv", self._rank, self._limit_s, tensors, request, data, deliver)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MpiMessage:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    # -- inside --------------------------------------------------------------------------------

    def _close(self, limit_s: float) -> None:
        if self._open:
            self._open = False
            self._progress.close(limit_s)

    def _submit(
        self, name: str, call: Callable[[], None], tensors: list[Any], *, meet: bool = True
    ) -> PendingWork:
        """Queue `call`; with `meet`, it begins when every rank has come to it.

        Why no rank may block before all are there: a blocking call spins while it waits for a late
        peer, and here it would take the core from the backward pass that still runs; nor could it
        be given up. So an operation begins with a non-blocking barrier, polled with sleeps.
        """
        operation = arrive(self._name, self._size, name, payload_bytes(tensors))

        def met() -> None:
            self._reductions.meet(name)
            call()

        return self._progress.submit(name, met if meet else call, tensors, operation)

    def _reduce_over_all(self, tensor: Tensor, operation: MPI.Op, *, average: bool) -> None:
        with reducible(tensor) as buffer:
            self._reductions.allreduce(buffer.numpy(), operation)
            if average:
                divide(buffer, self._size)

    def _send_to_all(self, tensor: Tensor, root: int) -> None:
        with as_bytes(tensor, written=self._rank != root) as data:
            for piece in pieces(data):
                self._comm.Bcast(piece, root)

    def _send_to(self, tensor: Tensor, target: int) -> None:
        with as_bytes(tensor, written=False) as data:
            for piece in pieces(data):
                self._comm.Send(piece, target)

    def _receive_from(self, tensor: Tensor, source: int) -> None:
        with as_bytes(tensor, written=True) as data:
            for piece in pieces(data):
                self._comm.Recv(piece, source)

    def _make_communicators(self, members: list[int]) -> None:
        world = MPI.COMM_WORLD
        group = world.group.Incl(members)
        # Groups made at the same time by different ranks are told apart by the tag.
        tag = zlib.crc32(self._name.encode()) % _LARGEST_TAG
        self._comm = world.Create_group(group, tag)
        self._messages = self._comm.Dup()
        group.Free()
        self._reductions = Reductions(
            self._comm,
            rank=self._rank,
            size=self._size,
            store=self._store,
            limit_s=self._limit_s,
            algorithm=self._algorithm,
        )

    def _free_communicators(self) -> None:
        self._reductions.close()
        self._messages.Free()
        self._comm.Free()
