"""Buckets of DDP that the ranks of a host reduce where they are.

    model = DistributedDataParallel(model)
    share_buckets(model)

A bucket is moved into shared memory once (`Tensor.share_memory_`), and each rank maps those of the
others. In a sum a rank reduces its part of its own bucket, reading the others'; then it copies the
parts of the others from theirs. It writes into its own memory only, so a rank that comes late, or
is stopped in the middle, changes nothing that another one may already use for something else.
"""

# No `from __future__ import annotations`: DDP reads those of a hook.

import mmap
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.collectives.buffers import Reduction, array_of, byte_view, is_dense, is_on_host
from paceline.collectives.message_schedules import share_bounds
from paceline.collectives.node.memory import is_unnamed_file, open_memory
from paceline.collectives.shared_memory import SharedSegments
from paceline.collectives.torch_internals import GradBucket, shared_descriptor

# Smaller tensors gain nothing from being read in place.
LEAST_BYTES = 2**19
_BLOCK_BYTES = 256 * 2**10  # three blocks fit in a core's second-level cache
_RECORD_BYTES = 128
_FOLDER = "/dev/shm"  # noqa: S108  (where torch's shared memory is)
_LINK = re.compile(rf"{_FOLDER}/torch_\S+ \(deleted\)")
_RECORD = re.compile(r"(\S+) ([0-9]+) ([0-9]+) ([0-9]+) ([0-9]+)")


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """A tensor of this rank, and the bytes of all ranks' tensors, by rank; each array is flat."""

    tensor: Tensor
    parts: dict[int, NDArray[np.uint8]]


class SharedTensors:
    """Tensors that the ranks of a group on one host have shared; one thread at a time uses it."""

    def __init__(self, segments: SharedSegments, rank: int, ranks: int) -> None:
        self._segments, self._rank, self._ranks = segments, rank, ranks
        self._shared: dict[int, _Shared] = {}  # by address

    def share(self, tensor: Tensor) -> bool:
        """Share a tensor of the same size on all ranks; collective. Return whether all could.

        It is moved into shared memory, where all of its views follow it.
        """
        others = self._open_others(self._exchange(_described(tensor)), tensor.nbytes)
        has_all = self._exchange("" if others is None else "yes").count("yes") == self._ranks
        if has_all and others is not None:
            parts = {**others, self._rank: byte_view(tensor.detach().view(-1))}
            self._shared[tensor.data_ptr()] = _Shared(tensor, parts)
        return has_all

    def forget(self, tensor: Tensor) -> None:
        """Keep neither the tensor nor the others' any longer."""
        self._shared.pop(tensor.data_ptr(), None)

    def has(self, tensors: Sequence[Tensor], reductions: Sequence[Reduction]) -> bool:
        """Return whether this is one shared tensor, of a type in which it can be reduced."""
        if len(tensors) != 1 or not self._shared:
            return False
        (tensor,), (reduction,) = tensors, reductions
        found = self._shared.get(tensor.data_ptr())
        return (
            found is not None
            and found.tensor.nbytes == tensor.nbytes
            and reduction.dtype(tensor.dtype) == tensor.dtype
            and reduction.factor is None
        )

    def reduce(
        self, tensor: Tensor, reduction: Reduction, synchronise: Callable[[str], None]
    ) -> None:
        """Reduce a shared tensor over all ranks in place. All ranks get bit-identical results.

        synchronise: waits for all ranks in the operation of the given name.
        """
        own = array_of(tensor.detach().view(-1))
        parts = self._shared[tensor.data_ptr()].parts
        arrays = {rank: part.view(own.dtype) for rank, part in parts.items()}
        synchronise("allreduce")
        start, stop = share_bounds(len(own), self._rank, self._ranks)
        length = _BLOCK_BYTES // own.itemsize
        for begin in range(start, stop, length):
            block = slice(begin, min(begin + length, stop))
            _reduce_block(
                [arrays[rank][block] for rank in range(self._ranks)], own[block], reduction
            )
        synchronise("allreduce")  # all parts are reduced
        for other in range(self._ranks):
            if other != self._rank:
                begin, end = share_bounds(len(own), other, self._ranks)
                own[begin:end] = arrays[other][begin:end]
        synchronise("allreduce")  # all have read

    def _exchange(self, record: str) -> list[str]:
        """Return the records of all ranks, in ASCII and shorter than _RECORD_BYTES; collective."""
        records = np.zeros((self._ranks, _RECORD_BYTES), np.uint8)
        records[self._rank, : len(record)] = list(record.encode("ascii"))
        self._segments.all_gather(dict(enumerate(records)))
        return [each.tobytes().rstrip(b"\0").decode("ascii") for each in records]

    def _open_others(
        self, records: Sequence[str], size: int
    ) -> dict[int, NDArray[np.uint8]] | None:
        """Return the memory of the other ranks' tensors; None if one cannot be opened."""
        if not all(records):
            return None
        others = {}
        for rank, record in enumerate(records):
            if rank != self._rank:
                found = _opened(record, size)
                if found is None:
                    return None
                others[rank] = found
        return others


def _reduce_block(blocks: Sequence[NDArray[Any]], own: NDArray[Any], reduction: Reduction) -> None:
    """Reduce the blocks of all ranks, in their order, into `own`, one of them; others are read."""
    result, *rest = blocks
    with np.errstate(all="ignore"):  # infinities and NaN are the user's, as in torch
        for number, block in enumerate(rest):
            # `own` must not be overwritten before it is used.
            target = own if number == len(rest) - 1 else None
            result = reduction.ufunc(result, block, out=target)
    reduction.end(torch.from_numpy(own), len(blocks))


def _described(tensor: Tensor) -> str:
    """Move a tensor into shared memory and describe where it is; empty if that cannot be."""
    is_suitable = is_on_host(tensor) and is_dense(tensor) and tensor.is_contiguous()
    if not is_suitable or tensor.nbytes < LEAST_BYTES or not _has_space(tensor):
        return ""
    try:
        descriptor = shared_descriptor(tensor)
        found = os.fstat(descriptor)
    except (OSError, RuntimeError):  # forbidden, or a limit of the process
        return ""
    offset = tensor.storage_offset() * tensor.itemsize
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    return f"{path} {found.st_dev} {found.st_ino} {found.st_size} {offset}"


def _has_space(tensor: Tensor) -> bool:
    """Return whether shared memory has room: a page that does not fit would end the process."""
    storage: Any = tensor.untyped_storage()
    if storage.is_shared():
        return True
    with suppress(OSError):
        return bool(shutil.disk_usage(_FOLDER).free > 4 * storage.nbytes())
    return False


def _opened(record: str, size: int) -> NDArray[np.uint8] | None:
    """Map the memory of another rank's tensor, if the kernel says that it is what was described."""
    match = _RECORD.fullmatch(record)
    if match is None:
        return None
    path, (device, inode, length, offset) = match[1], map(int, match.groups()[1:])

    def is_described(descriptor: int) -> bool:
        found = os.fstat(descriptor)
        is_same = (found.st_dev, found.st_ino) == (device, inode)
        return is_same and is_unnamed_file(descriptor, length) and offset + size <= length

    descriptor = open_memory(path, _LINK, is_described)
    if descriptor is None:
        return None
    try:
        memory = mmap.mmap(descriptor, length, prot=mmap.PROT_READ)
    except OSError:  # a limit of the process
        return None
    finally:
        os.close(descriptor)
    return np.frombuffer(memory, np.uint8)[offset : offset + size]


# --- the hook of DDP ---------------------------------------------------------------------------


def share_buckets(model: DistributedDataParallel) -> None:
    """Let the ranks of a host reduce the buckets of a model in place, over back end "paceline".

    Call it on all ranks before the first step. Over other back ends, on several hosts, and where
    /dev/shm has no room, the buckets are reduced as without it. A model has one such hook.
    """
    model.register_comm_hook(_Buckets(model.process_group), average_bucket)


class _Buckets:
    """The buckets that have been shared, by their number."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self._known: dict[int, Tensor] = {}

    def share(self, number: int, buffer: Tensor) -> None:
        """Share a bucket, unless that was tried; DDP makes new ones after the first step."""
        known = self._known.get(number)
        if known is not None and known.data_ptr() == buffer.data_ptr():
            return
        share = getattr(self.group, "share_tensor", None)
        if share is not None and buffer.nbytes >= LEAST_BYTES:
            share(buffer, known)
        self._known[number] = buffer


def average_bucket(state: _Buckets, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket over the ranks."""
    buffer = bucket.buffer()
    state.share(bucket.index(), buffer)
    averages = hasattr(state.group, "share_tensor")  # Gloo has no average
    if not averages:
        buffer.div_(state.group.size())
    operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
    work = dist.all_reduce(buffer, operation, group=state.group, async_op=True)
    assert work is not None, "every rank of DDP belongs to its group"
    averaged: Future[Tensor] = work.get_future().then(_first)
    return averaged


def _first(done: Future[list[Tensor]]) -> Tensor:
    [averaged] = done.value()
    return averaged
