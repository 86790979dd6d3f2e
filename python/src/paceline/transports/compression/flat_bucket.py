"""Buckets for gradients that torch's DistributedDataParallel does not bucket itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class FlatBucket:
    """Gradients of several tensors in one buffer that is reused in every step."""

    def __init__(self, index: int, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        sizes = [torch.Size(shape).numel() for shape in shapes]
        self._index = index
        self._buffer = torch.zeros(sum(sizes), device=device)
        parts = torch.split(self._buffer, sizes)
        self._parts = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._last = False

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return self._parts

    def parameters(self) -> list[Tensor]:
        """Return the places of the gradients, which stay the same like parameters."""
        return self._parts

    def is_last(self) -> bool:
        return self._last

    def mark_last(self) -> None:
        self._last = True

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy gradients in; each has shape (elements,) or the shape of its place."""
        for part, tensor in zip(self._parts, tensors, strict=True):
            part.copy_(tensor.view_as(part))

    def empty_into(self, tensors: Sequence[Tensor]) -> None:
        """Copy the content back to tensors like those of `fill`."""
        for part, tensor in zip(self._parts, tensors, strict=True):
            tensor.view_as(part).copy_(part)


def pack(
    shapes: Sequence[tuple[int, ...]], most_bytes: float, device: torch.device
) -> list[FlatBucket]:
    """Return buckets of float32 tensors with these shapes, in order, each of at most `most_bytes`
    or of one tensor."""
    groups: list[list[tuple[int, ...]]] = []
    room = 0.0
    for shape in shapes:
        size = 4 * torch.Size(shape).numel()
        if not groups or size > room:
            groups.append([])
            room = most_bytes
        groups[-1].append(shape)
        room -= size
    buckets = [FlatBucket(index, group, device) for index, group in enumerate(groups)]
    if buckets:
        buckets[-1].mark_last()
    return buckets
