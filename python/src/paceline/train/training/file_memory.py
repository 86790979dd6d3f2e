"""Tensors in a temporary file without a name, which the kernel can move from memory to the disk.

So a rank can pass over all tensors of a model that is larger than its memory. The folder of
temporary files (TMPDIR) must be on a disk: a file system in memory would keep them there.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.base.torch_internals import NewTensors, storage_number

# Smaller tensors stay in memory, so that each of the others has whole pages.
_LEAST_BYTES = 1 << 16


class FileMemory:
    """A file that contains tensors, which are released together when nothing uses them."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="paceline-")  # noqa: SIM115  (closed when freed)
        self._end = 0
        self._maps: dict[int, mmap.mmap] = {}  # by the number of the storage

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor in the file. Raises OSError if the disk is full."""
        size = math.prod(shape) * dtype.itemsize
        if size < _LEAST_BYTES:
            return torch.empty(shape, dtype=dtype)
        start, self._end = self._end, self._end + size + -size % mmap.ALLOCATIONGRANULARITY
        # A full disk is an error now, and not a signal when a page is written.
        os.posix_fallocate(self._file.fileno(), start, self._end - start)
        mapped = mmap.mmap(self._file.fileno(), size, offset=start)
        tensor = torch.frombuffer(mapped, dtype=dtype)
        self._maps[storage_number(tensor)] = mapped
        return tensor.view(shape)

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in the file, and release its pages."""
        copy = self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor.detach())
        self.release(copy)
        return copy

    def release(self, tensor: Tensor) -> None:
        """Remove the pages of a tensor from this process; the file keeps their content."""
        mapped = self._maps.get(storage_number(tensor))
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)

    @contextmanager
    def for_new_tensors(self) -> Iterator[None]:
        """Let this thread create tensors on the CPU in the file meanwhile, whatever creates them.

        Every operation releases the pages of the tensors that it used.
        """
        with NewTensors(self._moved, self.release):
            yield

    def _moved(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the same content in the file."""
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" or storage.nbytes() < _LEAST_BYTES:
            return tensor
        flat = tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
        return self.copy_of(flat).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
