"""What a bucket of gradients is, and what sums it over ranks.

Gradients here are summed, never averaged: each rank's are its part of the global mean already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


class Bucket(Protocol):
    """What is summed at once: gradients one after the other. torch's GradBucket is one."""

    def index(self) -> int:
        """Which of the step's it is, from 0; the same on all ranks."""

    def buffer(self) -> Tensor:
        """All its gradients, shape (elements,), float32; the sum takes their place."""

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, each with its parameter's shape."""

    def parameters(self) -> list[Tensor]:
        """What the gradients are of: the same objects in every step."""

    def is_last(self) -> bool:
        """Whether it is the step's last."""


class GradientSum(Protocol):
    """Sums buckets over the ranks of a group, beside whatever else the rank does."""

    def start(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        """Begin to sum a bucket, in place; all ranks come with the same ones in the same order.

        Returns at once. The future holds the buffer with the sum, the very same bits on all ranks.
        """

    def describe(self) -> dict[str, Any]:
        """What was sent and how: see `Meter`."""

    def close(self, *, failed: bool) -> None:
        """End what runs beside; harmless when called again. Waits for no peer."""


class Compressor(Protocol):
    """A way to sum a bucket by sending less than its gradients."""

    name: str

    def sum(self, bucket: Bucket) -> float:
        """Sum a bucket in place over the group; blocks. Returns the bytes that this rank sent."""

    def describe(self) -> dict[str, Any]:
        """Its settings."""


class Meter:
    """Bytes that a rank sends a step, of the last step that ended.

    They are what a network would carry with algorithms that send no byte twice (see the functions
    below); what ranks of one host write into memory that they share is counted alike.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._sent = self._uncompressed = 0.0
        self._last: tuple[float, float] | None = None

    def count(self, bucket: Bucket, sent_bytes: float | None = None) -> None:
        """sent_bytes: for `bucket`; None for those of an all-reduce of it as it is."""
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


def all_reduce_bytes(payload_bytes: float, ranks: int) -> float:
    """That each of n ranks sends: (n - 1) / n of the payload to add up, and as much to hand out
    (Patarasuk and Yuan: Bandwidth optimal all-reduce algorithms, JPDC 69(2), 2009)."""
    return 2 * exchange_bytes(payload_bytes, ranks)


def exchange_bytes(payload_bytes: float, ranks: int) -> float:
    """That each of n ranks sends where the n-th parts of its payload go to different ranks."""
    return payload_bytes * (ranks - 1) / ranks


def all_gather_bytes(payload_bytes: float, ranks: int) -> float:
    """That each of n ranks sends where all get its payload."""
    return payload_bytes * (ranks - 1)


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def only_tensor(future: torch.futures.Future[Sequence[Tensor]]) -> Tensor:
    """What the future of a work on one tensor holds."""
    return future.value()[0]
