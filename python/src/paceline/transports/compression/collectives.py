"""Blocking collectives of bytes for compressed gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


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
