"""The samples of a script's steps, from the batches of its DataLoader or the input of its model.

A batch counts at the next backward pass: some frameworks fetch one batch ahead. Several passes over
one batch (as in a GAN) count it once. Without a DataLoader, the first call of a module tells how
many samples each step has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_CHECKSUM_BYTES = 8


class BatchCounter:
    """Counts the samples of this rank, step by step."""

    def __init__(self) -> None:
        self.first_sha256: str | None = None  # of the first batch
        self._size: int | None = None
        self._is_new = False
        self._counted: int | None = None  # samples of the step so far

    def fetched(self, batch: Any) -> None:
        """Take a batch of the DataLoader, or the input of the first module."""
        tensors = samples_of(batch)
        if not tensors:
            return
        if self.first_sha256 is None:
            self.first_sha256 = hashlib.sha256(repr(checksums(batch)).encode()).hexdigest()
        self._size, self._is_new = len(tensors[0]), True

    def passed_backward(self) -> None:
        if self._size is not None and (self._is_new or self._counted is None):
            self._counted = (self._counted or 0) + self._size
            self._is_new = False

    def take(self) -> int | None:
        """Return the samples of the step that ends; None if they are not known."""
        counted, self._counted = self._counted, None
        return counted


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tensor, or of nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def samples_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch that are as long as its first one; the samples are their rows.

    Empty if there are none, or if they are sharded over ranks.
    """
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim() and len(tensor)]
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        return []
    return [tensor for tensor in tensors if len(tensor) == len(tensors[0])]


def checksums(batch: Any) -> list[str] | None:
    """Return a checksum of each sample of a batch; None if it has no samples."""
    tensors = samples_of(batch)
    if not tensors:
        return None
    rows = [
        tensor.detach().cpu().contiguous().reshape(len(tensor), -1).view(torch.uint8).numpy()
        for tensor in tensors
    ]
    return [
        hashlib.blake2b(row.tobytes(), digest_size=_CHECKSUM_BYTES).hexdigest()
        for row in np.concatenate(rows, axis=1)
    ]
