"""Buckets of gradients, the interface of sums over ranks, and collectives of bytes.

Gradients are summed, never averaged: each rank's gradients are already its part of the global mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from paceline.costs.link_cost import all_reduce_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Bucket(Protocol):
    """Gradients that are summed together. torch's GradBucket implements it."""

    def index(self) -> int:
        """Return the index of the bucket within the step, from 0; equal on all ranks."""

    def buffer(self) -> Tensor:
        """Return all gradients, shape (elements,), float32; the sum replaces them."""

    def gradients(self) -> list[Tensor]:
        """Return views of the buffer with the shapes of the parameters."""

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the gradients: the same objects in every step."""

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the step."""


class GradientSum(Protocol):
    """Sums buckets over the ranks of a group, beside the other work of the rank."""

    def start(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        """Begin to sum a bucket in place, and return at once. All ranks pass the same buckets in
        the same order.

        The future holds the buffer with the sum, bit-identical on all ranks.
        """

    def describe(self) -> dict[str, Any]:
        """Return settings and traffic; see `Meter`."""

    def close(self, *, failed: bool) -> None:
        """End background threads without waiting for peers; a second call does nothing."""


class Compressor(Protocol):
    """Sums a bucket by sending less than its gradients."""

    name: str

    def sum(self, bucket: Bucket) -> float:
        """Sum a bucket in place over the group; blocks. Return the bytes that this rank sent."""

    def describe(self) -> dict[str, Any]:
        """Return the settings."""


class Meter:
    """Bytes that a rank sent in the last complete step.

    They are the bytes that a network would transfer with algorithms that send no byte twice (see
    `costs.link_cost`). Bytes that ranks of one host write into shared memory are counted
    alike.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._sent = self._uncompressed = 0.0
        self._last: tuple[float, float] | None = None

    def count(self, bucket: Bucket, sent_bytes: float | None = None) -> None:
        """Count a bucket. sent_bytes: None means those of an uncompressed all-reduce."""
        whole = all_reduce_bytes(bytes_of(bucket.buffer()), self._ranks)
        self._sent += whole if sent_bytes is None else sent_bytes
        self._uncompressed += whole
        if bucket.is_last():
            self._last = self._sent, self._uncompressed
            self._sent = self._uncompressed = 0.0

    def describe(self) -> dict[str, Any]:
        if self._last is None:
            return {}
        sent, uncompressed = self._last
        return {
            "sent_bytes_per_step": round(sent),
            "uncompressed_bytes_per_step": round(uncompressed),
        }


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def only_tensor(future: torch.futures.Future[Sequence[Tensor]]) -> Tensor:
    """Return the result of a work on one tensor."""
    return future.value()[0]


def all_to_all(parts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Send row k of `parts`, shape (ranks, n), to rank k. Return the received rows by sender."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def all_gather(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather `own`, shape (n,), with the same n on all ranks. Return shape (ranks, n)."""
    gathered = own.new_empty((dist.get_world_size(group), own.numel()))
    dist.all_gather(list(gathered.unbind()), own, group=group)
    return gathered
