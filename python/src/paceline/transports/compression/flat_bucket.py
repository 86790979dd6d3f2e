"""Buckets for gradients that torch's DistributedDataParallel does not put into its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class FlatBucket:
    """Some tensors' gradients in one buffer, kept from step to step."""

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
        """The places of the gradients: as the buffer, they stay the same."""
        return self._parts

    def is_last(self) -> bool:
        return self._last

    def mark_last(self) -> None:
        self._last = True

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy gradients in; of each, shape (elements,) or the shape of its place."""
        for part, tensor in zip(self._parts, tensors, strict=True):
            part.copy_(tensor.view_as(part))

    def empty_into(self, tensors: Sequence[Tensor]) -> None:
        """Copy what is there now to where `fill` had it from."""
        for part, tensor in zip(self._parts, tensors, strict=True):
            tensor.view_as(part).copy_(part)


def pack(
    shapes: Sequence[tuple[int, ...]], most_bytes: float, device: torch.device
) -> list[FlatBucket]:
    """Buckets of float32 tensors of these shapes, in their order, each of at most `most_bytes` or
    of one tensor."""
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
