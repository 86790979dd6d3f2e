"""Collectives that move tensors between the ranks of a group.

They are non-blocking MPI calls that one thread polls, in the same order on all ranks. Blocking
calls spin while they wait for a peer, which costs more than it gains on busy cores (broadcast of 25
MB between two ranks beside other work: 100 ms, polled 3 ms), and they cannot be given up. Lists
have one entry for each rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from paceline.collectives.agreement import check_counts
from paceline.collectives.buffers import (
    Reduction,
    array_of,
    byte_view,
    concatenated,
    copy_back,
    scatter_into,
    wire_buffer,
)
from paceline.collectives.message_schedules import MESSAGE_BYTES
from paceline.collectives.mpi.all_reduce import of_rank_0
from paceline.collectives.mpi.message_collectives import MessageCollectives
from paceline.collectives.mpi.world import RankNames, complete
from paceline.collectives.recorder import GroupDescription

# MPI types that move elements of a given size. Bytes would exceed MPI's count limit sooner.
_UNITS = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}
_LARGEST_COUNT = 2**31 - 1  # elements: MPI counts and offsets are of type int

_RING, _NATIVE = "ring", "native"
# Alone, MPI's own all-gather is faster on links as fast as memory. On others it is as fast as the
# ring or half as fast, by chance, so their times do not tell which one is better.
_FAST_BYTES_PER_S = 4e8
_TRIED_BYTES = 2**20  # all parts together
_TRIES = 2


class Collectives:
    """Collectives among the ranks of `comm`. Each raises TimedOut if it does not end within
    `limit_s`."""

    def __init__(self, comm: MPI.Intracomm, names: RankNames, limit_s: float) -> None:
        self._comm = comm
        self._rank = comm.rank
        self._world_rank = names.world_ranks[comm.rank]
        self._limit_s = limit_s
        # Within a host, MPI's own all-gather copies through shared memory.
        spans_hosts = len(set(names.hosts)) > 1
        self._ring = MessageCollectives(comm, names, limit_s) if spans_hosts else None
        self._long_gather: str | None = None  # how long parts are gathered; None: not measured

    def describe(self) -> GroupDescription:
        """Return how long parts are gathered, for the records; empty if none was gathered."""
        return {} if self._long_gather is None else {"all_gather": self._long_gather}

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the root's tensor to every rank."""
        flat = wire_buffer(tensor)
        self._wait("broadcast", self._comm.Ibcast(message_of(flat), root))
        if self._rank != root:
            copy_back(flat, tensor)

    def all_gather(self, outputs: Sequence[Tensor], own: Tensor) -> None:
        """Copy every rank's tensor to every rank; sizes may differ between ranks."""
        mine, lengths = wire_buffer(own), _lengths(outputs)
        flat = mine.new_empty(sum(lengths))
        self._all_gather_flat(flat, mine, lengths)
        scatter_into(flat, outputs)

    def all_gather_single(self, output: Tensor, own: Tensor) -> None:
        """Copy every rank's tensor, all of one size, consecutively into `output`."""
        mine, flat = wire_buffer(own), wire_buffer(output)
        self._all_gather_flat(flat, mine, [own.numel()] * self._comm.size)
        copy_back(flat, output)

    def gather(self, outputs: Sequence[Tensor], own: Tensor, root: int) -> None:
        """Copy every rank's tensor to the root; sizes may differ. `outputs` is used on the root
        only."""
        mine, lengths = wire_buffer(own), _lengths(outputs)
        self._agree_on_parts("gather", self._only(root, len(mine)), lengths)
        flat = mine.new_empty(sum(lengths))
        shares = vector_message(flat, lengths) if self._rank == root else None
        self._wait("gather", self._comm.Igatherv(message_of(mine), shares, root))
        if self._rank == root:
            scatter_into(flat, outputs)

    def scatter(self, own: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        """Copy one of the root's tensors to each rank. `inputs` is used on the root only."""
        mine = wire_buffer(own)
        self._agree_on_parts("scatter", _lengths(inputs), self._only(root, len(mine)))
        flat = wire_buffer(concatenated(inputs)) if self._rank == root else mine
        shares = vector_message(flat, _lengths(inputs)) if self._rank == root else None
        self._wait("scatter", self._comm.Iscatterv(shares, message_of(mine), root))
        copy_back(mine, own)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Exchange each rank's part of every rank's inputs; sizes may differ."""
        sent, lengths = wire_buffer(concatenated(inputs)), _lengths(outputs)
        self._agree_on_parts("alltoall", _lengths(inputs), lengths)
        flat = sent.new_empty(sum(lengths))
        self._all_to_all_v("alltoall", flat, lengths, sent, _lengths(inputs))
        scatter_into(flat, outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        own: Tensor,
        output_lengths: Sequence[int],
        input_lengths: Sequence[int],
    ) -> None:
        """Do the same as all_to_all with tensors that hold all parts; lengths are in elements."""
        flat = wire_buffer(output)
        self._agree_on_parts("alltoall", input_lengths, output_lengths)
        self._all_to_all_v("alltoall", flat, output_lengths, wire_buffer(own), input_lengths)
        copy_back(flat, output)

    def reduce_scatter(
        self, output: Tensor, inputs: Tensor, lengths: Sequence[int], reduction: Reduction
    ) -> None:
        """Reduce all ranks' inputs, and return this rank's part in `output`. The inputs are
        unchanged.

        inputs: one part for each rank, of `lengths` elements. Each rank receives its part from all
        others and reduces it in the order of the ranks; a ring sends the same volume.
        """
        sent, ranks = reduction.begin(inputs), len(lengths)
        flat = sent.new_empty(ranks * lengths[self._rank])
        self._all_to_all_v("reduce_scatter", flat, [lengths[self._rank]] * ranks, sent, lengths)
        rows = flat.view(ranks, -1)
        reduced = array_of(rows[0])
        for row in rows[1:]:
            reduction.ufunc(reduced, array_of(row), out=reduced)
        reduction.end(rows[0], ranks)
        copy_back(rows[0], output)

    def _all_gather_flat(self, flat: Tensor, own: Tensor, lengths: Sequence[int]) -> None:
        if self._ring is None or len(set(lengths)) > 1:
            self._native_gather(flat, own, lengths)
            return
        if self._long_gather is None:
            self._long_gather = self._gather_of_link()
        long = own.nbytes > MESSAGE_BYTES
        self._gather_by(self._long_gather if long else _NATIVE, flat, own)

    def _gather_by(self, algorithm: str, flat: Tensor, own: Tensor) -> None:
        if algorithm == _RING:
            assert self._ring is not None
            self._ring.all_gather(byte_view(flat), byte_view(own))
        else:
            self._native_gather(flat, own, [len(own)] * self._comm.size)

    def _native_gather(self, flat: Tensor, own: Tensor, lengths: Sequence[int]) -> None:
        message = vector_message(flat, lengths)
        self._wait("allgather", self._comm.Iallgatherv(message_of(own), message))

    def _gather_of_link(self) -> str:
        """Return how to gather long parts over this link, as rank 0 measures it; collective."""
        ranks = self._comm.size
        own = torch.zeros(_TRIED_BYTES // ranks, dtype=torch.uint8)
        flat = own.new_empty(ranks * len(own))
        self._gather_by(_RING, flat[:ranks], own[:1])  # opens connections
        fastest_s = math.inf
        for _ in range(_TRIES):
            started_s = time.perf_counter()
            self._gather_by(_RING, flat, own)
            fastest_s = min(fastest_s, time.perf_counter() - started_s)
        is_fast = (ranks - 1) * len(own) > _FAST_BYTES_PER_S * fastest_s
        mine = _NATIVE if is_fast else _RING
        chosen: str = of_rank_0(mine, self._comm, self._world_rank, self._limit_s)
        return chosen

    def _agree_on_parts(self, name: str, sent: Sequence[int], expected: Sequence[int]) -> None:
        """Raise CallsDiffer on all ranks if one sends another count than its receiver expects.

        sent, expected: elements for each rank, and from each; empty means none. MPI would report
        that to some ranks only, if at all.
        """
        ranks = self._comm.size
        own = np.zeros((2, ranks), np.int64)
        own[0, : len(sent)] = sent
        own[1, : len(expected)] = expected
        counts = np.zeros((ranks, 2, ranks), np.int64)
        self._wait(name, self._comm.Iallgather(own, counts))
        check_counts(name, counts)

    def _only(self, rank: int, count: int) -> list[int]:
        """Return the elements for each rank, or from each, if there are some for one only."""
        return [count if other == rank else 0 for other in range(self._comm.size)]

    def _all_to_all_v(
        self,
        name: str,
        received: Tensor,
        received_lengths: Sequence[int],
        sent: Tensor,
        sent_lengths: Sequence[int],
    ) -> None:
        into = vector_message(received, received_lengths)
        self._wait(name, self._comm.Ialltoallv(vector_message(sent, sent_lengths), into))

    def _wait(self, name: str, request: MPI.Request) -> None:
        complete(request, name, self._world_rank, self._limit_s)


def _lengths(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def message_of(flat: Tensor) -> list[Any]:
    """Describe a flat tensor as the buffer of one MPI call."""
    _check_count(len(flat))
    return [byte_view(flat), len(flat), _UNITS[flat.element_size()]]


def vector_message(flat: Tensor, lengths: Sequence[int]) -> list[Any]:
    """Describe a flat tensor as consecutive parts of `lengths` elements, one for each rank."""
    _check_count(len(flat))
    offsets = [sum(lengths[:rank]) for rank in range(len(lengths))]
    return [byte_view(flat), (list(lengths), offsets), _UNITS[flat.element_size()]]


def _check_count(count: int) -> None:
    if count > _LARGEST_COUNT:
        raise ValueError(
            f"transport mpi: one operation moves at most {_LARGEST_COUNT} elements, got {count}; "
            "split the tensor"
        )
