"""The collectives that compressed gradients need, for bytes; they block."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def all_to_all(parts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """parts: shape (ranks, n), the k-th for rank k. Returns what is for this rank, by sender."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def all_gather(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """own: shape (n,), the same n on all ranks. Returns shape (ranks, n)."""
    gathered = own.new_empty((dist.get_world_size(group), own.numel()))
    dist.all_gather(list(gathered.unbind()), own, group=group)
    return gathered
