"""torch's ProcessGroup over an MPI communicator of its own: every operation that torch has.

Signatures are torch's, which calls them from Python and, for DistributedDataParallel and
functional collectives, from C++. Lists of tensors have one entry for each rank unless said
otherwise; ranks are those of the group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from mpi4py import MPI

from paceline.transports.mpi.buffers import deal_out, joined, on_wire, put_back, whole
from paceline.transports.mpi.core import BACKEND, GroupCore
from paceline.transports.mpi.joint import carried_in_all, of_one_type
from paceline.transports.mpi.operations import Reduction, reduction_of
from paceline.transports.mpi.reductions import Carried

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.transports.mpi.messages import MpiMessage
    from paceline.transports.work import PendingWork

__all__ = ["BACKEND", "MpiProcessGroup"]


class MpiProcessGroup(GroupCore):
    """See GroupCore for its making."""

    # -- reductions ----------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> PendingWork:
        """Reduce each tensor over all ranks, in place; all ranks get the very same bits."""
        reduce_op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        reductions = [reduction_of(reduce_op, tensor.dtype) for tensor in tensors]

        def call() -> Carried | None:
            together = of_one_type(tensors)
            carried = [
                self._reduce_over_all(part, reduction)
                for part, reduction in zip(together, reductions, strict=False)  # one if of one type
            ]
            if together is not tensors:
                deal_out(together[0], tensors)
            return carried_in_all(carried)

        # The reductions meet on their own.
        return self._submit("allreduce", call, tensors, tensors, synchronise=False)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> PendingWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> PendingWork:
        """Reduce onto `opts.rootRank`; the other ranks' tensors stay as they are.

        By all-reduce, which sleeps while it waits and can be given up, as MPI's Reduce cannot.
        """
        (tensor,) = tensors
        reduction = reduction_of(opts.reduceOp, tensor.dtype)

        def call() -> Carried:
            kept = tensor if self._rank == opts.rootRank else tensor.detach().clone()
            return self._reduce_over_all(kept, reduction)

        return self._submit("reduce", call, tensors, tensors, synchronise=False)

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any
    ) -> PendingWork:
        """Each rank's part of the reduction of all ranks' lists, which are kept."""
        (output,), (inputs,) = output_tensors, input_tensors
        reduction = reduction_of(opts.reduceOp, output.dtype)

        def call() -> None:
            lengths = [part.numel() for part in inputs]
            self._exchanges.reduce_scatter(output, joined(inputs), lengths, reduction)

        return self._submit("reduce_scatter", call, output_tensors, inputs)

    def reduce_scatter_single(self, output: Tensor, own: Tensor, opts: Any = None) -> PendingWork:
        """As reduce_scatter, of tensors that hold the parts of all ranks one after the other."""
        return self.reduce_scatter_single_coalesced([output], [own], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> PendingWork:
        """reduce_scatter_single for each pair."""
        reduce_op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        reductions = [reduction_of(reduce_op, output.dtype) for output in outputs]

        def call() -> None:
            for output, own, reduction in zip(outputs, inputs, reductions, strict=True):
                lengths = [output.numel()] * self._size
                self._exchanges.reduce_scatter(output, own, lengths, reduction)

        return self._submit("reduce_scatter", call, outputs, inputs)

    # -- moving --------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> PendingWork:
        """The tensors of `opts.rootRank` on every rank."""
        root: int = opts.rootRank if opts is not None else 0

        def call() -> None:
            for tensor in tensors:
                self._exchanges.broadcast(tensor, root)

        return self._submit("broadcast", call, tensors, tensors)

    def allgather(
        self,
        output_tensors: list[list[Tensor]],
        input_tensors: list[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> PendingWork:
        """Every rank's tensor on every rank, for each input; sizes may differ between ranks."""

        def call() -> None:
            for outputs, own in zip(output_tensors, input_tensors, strict=True):
                self._exchanges.all_gather(outputs, own)

        return self._submit("allgather", call, output_tensors, input_tensors)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> PendingWork:
        """As allgather, with the outputs sorted by rank: entry r holds all tensors of rank r."""
        by_input = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        return self.allgather(by_input, input_list, opts)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> PendingWork:
        """Every rank's tensor one after the other in `output`."""
        return self.all_gather_single_coalesced([output], [own], opts)

    def all_gather_single_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> PendingWork:
        """all_gather_single for each pair."""

        def call() -> None:
            for output, own in zip(outputs, inputs, strict=True):
                self._exchanges.all_gather_single(output, own)

        return self._submit("allgather", call, outputs, inputs)

    def gather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any
    ) -> PendingWork:
        """Every rank's tensor on `opts.rootRank`."""
        (own,) = input_tensors
        outputs = output_tensors[0] if output_tensors else []

        def call() -> None:
            self._exchanges.gather(outputs, own, opts.rootRank)

        return self._submit("gather", call, output_tensors, input_tensors)

    def scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any
    ) -> PendingWork:
        """The parts that `opts.rootRank` has, one for each rank."""
        (own,) = output_tensors
        inputs = input_tensors[0] if input_tensors else []

        def call() -> None:
            self._exchanges.scatter(own, inputs, opts.rootRank)

        return self._submit("scatter", call, output_tensors, [own, *inputs])

    def alltoall(
        self,
        output_tensors: list[Tensor],
        input_tensors: list[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> PendingWork:
        """Each rank's part of every rank's list."""

        def call() -> None:
            self._exchanges.all_to_all(output_tensors, input_tensors)

        return self._submit("alltoall", call, output_tensors, input_tensors)

    def all_to_all_single(
        self,
        output: Tensor,
        own: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,  # noqa: ARG002
    ) -> PendingWork:
        """As alltoall, of tensors split along their first dimension; without sizes in equal parts.

        Raises ValueError if the sizes do not add up to the tensor's.
        """
        output_lengths = _split_lengths(output, output_split_sizes, self._size)
        input_lengths = _split_lengths(own, input_split_sizes, self._size)

        def call() -> None:
            self._exchanges.all_to_all_single(output, own, output_lengths, input_lengths)

        return self._submit("alltoall", call, [output], [own])

    # The names of these operations before torch 2.13, which some callers still use.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- messages between two ranks ------------------------------------------------------------

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> MpiMessage:
        (tensor,) = tensors

        def begin(tensor: Tensor) -> tuple[Any, MPI.Request, Callable[[], None]]:
            flat = on_wire(tensor)
            return flat, self._messages.Isend(whole(flat), destination, tag), lambda: None

        peers, told_as = f"{self._rank}->{destination}", f"to {self._names(destination)}"
        return self._post("send", peers, told_as, tensor, begin)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> MpiMessage:
        told_as = f"from {self._names(source)}"
        return self._receive(tensors, source, tag, told_as, "recv")

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MpiMessage:
        return self._receive(tensors, MPI.ANY_SOURCE, tag, "from any rank", "recvAnySource")

    # -- inside --------------------------------------------------------------------------------

    def _receive(
        self, tensors: list[Tensor], source: int, tag: int, told_as: str, shown_name: str
    ) -> MpiMessage:
        (tensor,) = tensors
        peers = f"{'*' if source == MPI.ANY_SOURCE else source}->{self._rank}"

        def begin(tensor: Tensor) -> tuple[Any, MPI.Request, Callable[[], None]]:
            flat = on_wire(tensor)
            request = self._messages.Irecv(whole(flat), source, tag)
            return flat, request, lambda: put_back(flat, tensor)

        return self._post("recv", peers, told_as, tensor, begin, shown_name)

    def _reduce_over_all(self, tensor: Tensor, reduction: Reduction) -> Carried:
        flat = reduction.begin(tensor)
        carried = self._reductions.allreduce(flat.numpy(), reduction.operation)
        reduction.end(flat, self._size)
        put_back(flat, tensor)
        return carried


def _split_lengths(tensor: Tensor, sizes: Sequence[int], ranks: int) -> list[int]:
    """How many elements go to or come from each rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % ranks:
            raise ValueError(
                f"transport mpi: expected a first dimension that {ranks} ranks share evenly, "
                f"got {rows}; give the split sizes"
            )
        sizes = [rows // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != rows:
        raise ValueError(
            f"transport mpi: expected {ranks} split sizes that add up to {rows}, the tensor's "
            f"first dimension; got {list(sizes)}"
        )
    row = tensor.numel() // rows if rows else 0
    return [size * row for size in sizes]
