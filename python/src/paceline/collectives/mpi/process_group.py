"""The backend `mpi4py` of torch.distributed: its registration, and its process group.

torch from PyPI is built without MPI. Importing this module initialises MPI (mpi4py does) and
registers the backend. A group has an MPI communicator of its own.

Signatures are those of torch, which calls them from Python and, for DistributedDataParallel and
functional collectives, from C++. Lists of tensors have one entry for each rank unless stated
otherwise; ranks are those of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from paceline.collectives.agreement import (
    check_parts,
    check_whole,
    described,
    name_of,
    root_of,
)
from paceline.collectives.buffers import concatenated, reduce_tensors, reduction_of
from paceline.collectives.errors import EnvironmentLacks, UsageError
from paceline.collectives.gloo_group import check_asked
from paceline.collectives.message_schedules import Algorithm
from paceline.collectives.mpi.all_reduce import CollectiveStatistics, combined_statistics
from paceline.collectives.mpi.collectives import message_of
from paceline.collectives.mpi.group_core import BACKEND, GroupCore
from paceline.collectives.mpi.point_to_point import MpiMessage
from paceline.collectives.recorder import GroupDescription
from paceline.collectives.torch_internals import untraced
from paceline.collectives.work import PendingWork

_THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a group of this backend: `init_process_group("mpi4py", pg_options=…)`.

    algorithm: all-reduce algorithm. Later groups use that of the default group unless they state
    their own.
    """

    algorithm: Algorithm = "auto"


@untraced
class MpiProcessGroup(GroupCore):
    """A process group over MPI; see GroupCore for construction."""

    # -- reductions ----------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> PendingWork:
        """Reduce each tensor over all ranks in place; all ranks get bit-identical results."""
        reduce_op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        reductions = [reduction_of(reduce_op, tensor.dtype) for tensor in tensors]

        def call() -> CollectiveStatistics | None:
            reduce = self._reductions.allreduce
            return combined_statistics(reduce_tensors(tensors, reductions, reduce, self._size))

        # Its messages wait for the other ranks.
        said = described("allreduce", tensors, name_of(reductions))
        return self._submit("allreduce", call, tensors, tensors, said=said, synchronise=False)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> PendingWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> PendingWork:
        """Reduce onto `opts.rootRank`; the tensors of the other ranks are unchanged.

        Uses all-reduce, which sleeps while it waits and can be given up. MPI's Reduce cannot.
        """
        (tensor,), root = tensors, root_of(opts, self._size)
        reduction = reduction_of(opts.reduceOp, tensor.dtype)

        def call() -> CollectiveStatistics:
            kept = tensor if self._rank == root else tensor.detach().clone()
            return reduce_tensors([kept], [reduction], self._reductions.allreduce, self._size)[0]

        said = described("reduce", tensors, reduction.name, "to", root)
        return self._submit("reduce", call, tensors, tensors, said=said, synchronise=False)

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any
    ) -> PendingWork:
        """Reduce all ranks' lists, and store this rank's part. The inputs are unchanged."""
        (output,), (inputs,) = output_tensors, input_tensors
        check_parts("reduce_scatter", inputs, output, self._rank, self._size)
        reduction = reduction_of(opts.reduceOp, output.dtype)

        def call() -> None:
            lengths = [part.numel() for part in inputs]
            self._collectives.reduce_scatter(output, concatenated(inputs), lengths, reduction)

        said = described("reduce_scatter", inputs, reduction.name)
        return self._submit("reduce_scatter", call, output_tensors, inputs, said=said)

    def reduce_scatter_single(self, output: Tensor, own: Tensor, opts: Any = None) -> PendingWork:
        """Do the same as reduce_scatter with tensors that hold the parts of all ranks
        consecutively."""
        return self.reduce_scatter_single_coalesced([output], [own], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> PendingWork:
        """Call reduce_scatter_single for each pair."""
        reduce_op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        reductions = [reduction_of(reduce_op, output.dtype) for output in outputs]
        for output, own in zip(outputs, inputs, strict=True):
            check_whole("reduce_scatter", own, output, self._size)

        def call() -> None:
            for output, own, reduction in zip(outputs, inputs, reductions, strict=True):
                lengths = [output.numel()] * self._size
                self._collectives.reduce_scatter(output, own, lengths, reduction)

        said = described("reduce_scatter", inputs, name_of(reductions), "of one of")
        return self._submit("reduce_scatter", call, outputs, inputs, said=said)

    # -- data movement -------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> PendingWork:
        """Copy the tensors of `opts.rootRank` to every rank."""
        root = 0 if opts is None else root_of(opts, self._size)

        def call() -> None:
            for tensor in tensors:
                self._collectives.broadcast(tensor, root)

        said = described("broadcast", tensors, "from", root)
        return self._submit("broadcast", call, tensors, tensors, said=said)

    def allgather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], _opts: Any = None
    ) -> PendingWork:
        """Copy every rank's tensor to every rank, for each input; sizes may differ between
        ranks."""
        for outputs, own in zip(output_tensors, input_tensors, strict=True):
            check_parts("all_gather", outputs, own, self._rank, self._size)

        def call() -> None:
            for outputs, own in zip(output_tensors, input_tensors, strict=True):
                self._collectives.all_gather(outputs, own)

        said = described("allgather", [*chain(*output_tensors)])
        return self._submit("allgather", call, output_tensors, input_tensors, said=said)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> PendingWork:
        """Do the same as allgather with outputs grouped by rank: entry r holds all tensors of rank
        r."""
        by_input = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        return self.allgather(by_input, input_list, opts)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> PendingWork:
        """Copy every rank's tensor consecutively into `output`."""
        return self.all_gather_single_coalesced([output], [own], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], _opts: Any = None
    ) -> PendingWork:
        """Call all_gather_single for each pair."""
        for output, own in zip(outputs, inputs, strict=True):
            check_whole("all_gather", output, own, self._size)

        def call() -> None:
            for output, own in zip(outputs, inputs, strict=True):
                self._collectives.all_gather_single(output, own)

        said = described("allgather", inputs, "into one of")
        return self._submit("allgather", call, outputs, inputs, said=said)

    def gather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any
    ) -> PendingWork:
        """Copy every rank's tensor to `opts.rootRank`."""
        (own,), root = input_tensors, root_of(opts, self._size)
        outputs = output_tensors[0] if output_tensors else []
        if root == self._rank:
            check_parts("gather", outputs, own, self._rank, self._size)
        call = partial(self._collectives.gather, outputs, own, root)
        said = described("gather", [], "to", root, "of", own.dtype)
        return self._submit("gather", call, output_tensors, input_tensors, said=said)

    def scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any
    ) -> PendingWork:
        """Copy one tensor of `opts.rootRank` to each rank."""
        (own,), root = output_tensors, root_of(opts, self._size)
        inputs = input_tensors[0] if input_tensors else []
        if root == self._rank:
            check_parts("scatter", inputs, own, self._rank, self._size)
        call = partial(self._collectives.scatter, own, inputs, root)
        said = described("scatter", [], "from", root, "of", own.dtype)
        return self._submit("scatter", call, output_tensors, [own, *inputs], said=said)

    def alltoall(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], _opts: Any = None
    ) -> PendingWork:
        """Exchange each rank's part of every rank's list."""
        call = partial(self._collectives.all_to_all, output_tensors, input_tensors)
        said = described("alltoall", [], "of", *{each.dtype for each in input_tensors})
        return self._submit("alltoall", call, output_tensors, input_tensors, said=said)

    def all_to_all_single(
        self,
        output: Tensor,
        own: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        _opts: Any = None,
    ) -> PendingWork:
        """Do the same as alltoall with tensors split along their first dimension; equal parts
        without sizes.

        Raises ValueError if the sizes do not add up to that of the tensor.
        """
        output_lengths = _split_lengths(output, output_split_sizes, self._size)
        input_lengths = _split_lengths(own, input_split_sizes, self._size)
        call = partial(
            self._collectives.all_to_all_single, output, own, output_lengths, input_lengths
        )
        said = described("alltoall", [], "of", own.dtype)
        return self._submit("alltoall", call, [output], [own], said=said)

    # Names of these operations before torch 2.13, which some callers still use.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- point-to-point messages ---------------------------------------------------------------

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> MpiMessage:
        (tensor,) = tensors

        def start(flat: Tensor) -> MPI.Request:
            return self._messages.Isend(message_of(flat), destination, tag)

        peers, peers_text = f"{self._rank}->{destination}", f"to {self._names(destination)}"
        return self._post("send", tensor, peers, peers_text, start)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> MpiMessage:
        peers_text = f"from {self._names(source)}"
        return self._receive(tensors, source, tag, peers_text, "recv")

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MpiMessage:
        return self._receive(tensors, MPI.ANY_SOURCE, tag, "from any rank", "recvAnySource")

    # -- inside --------------------------------------------------------------------------------

    def _receive(
        self, tensors: list[Tensor], source: int, tag: int, peers_text: str, profile_name: str
    ) -> MpiMessage:
        (tensor,) = tensors

        def start(flat: Tensor) -> MPI.Request:
            return self._messages.Irecv(message_of(flat), source, tag)

        peers = f"{'*' if source == MPI.ANY_SOURCE else source}->{self._rank}"
        return self._post("recv", tensor, peers, peers_text, start, profile_name)


def _split_lengths(tensor: Tensor, sizes: Sequence[int], ranks: int) -> list[int]:
    """Return how many elements are sent to, or received from, each rank."""
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


def _create_group(given: Any, options: Any) -> MpiProcessGroup:
    """Create a group; torch calls this for each group that contains this rank."""
    check_asked(BACKEND)
    members = list(given.global_ranks_in_group)
    if not members:  # the default group
        check_world(given.group_rank, given.group_size)
    return MpiProcessGroup(
        rank=given.group_rank,
        size=given.group_size,
        world_ranks=members,
        name=given.group_id,
        limit_s=given.timeout.total_seconds(),
        store=given.store,
        algorithm=_chosen(options).algorithm,
    )


def _chosen(options: Any) -> Options:
    """Return the given options, or those of the default group. Raises UsageError for another
    backend's options."""
    if options is None:
        default = dist.group.WORLD
        if isinstance(default, MpiProcessGroup):
            return Options(algorithm=default.algorithm)
        return Options()
    if not isinstance(options, Options):
        raise UsageError(
            f"backend {BACKEND}: expected pg_options of type paceline.mpi.Options, got "
            f"{type(options).__name__}"
        )
    return options


dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=["cpu", "cuda"])


def check_world(rank: int, world_size: int) -> None:
    """Raise EnvironmentLacks unless MPI_COMM_WORLD matches this trial and threads may call MPI."""
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (rank, world_size):
        raise EnvironmentLacks(
            f"expected to be rank {rank} of {world_size} in MPI_COMM_WORLD, but MPI reports rank "
            f"{world.rank} of {world.size}: transport 'mpi' needs ranks started by mpirun or "
            "by srun with the matching --mpi plugin (try `srun --mpi=list`)"
        )
    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE:
        raise EnvironmentLacks(
            f"this MPI provides {_THREAD_LEVELS[level]}, transport 'mpi' needs "
            "MPI_THREAD_MULTIPLE: use an MPI library that supports it"
        )


def describe_library() -> GroupDescription:
    """Return name and version of the MPI library, and how threads may call it."""
    version = MPI.Get_library_version().strip("\0 \n")
    return {
        "library": version.splitlines()[0].split(", package")[0],
        "thread_level": _THREAD_LEVELS[MPI.Query_thread()],
    }
