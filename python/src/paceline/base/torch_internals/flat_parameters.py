"""Parameters that FSDP 1 (FullyShardedDataParallel) has laid into a flat one and sharded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class FlatParameter:
    """One flat parameter; an optimiser has it, or views of this rank's part of the original ones.

    names: of the original parameters, in their order.
    _handle: torch.distributed.fsdp._flat_param.FlatParamHandle, which has no type.
    """

    names: list[str]
    _handle: Any

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return what an optimiser has: the flat one, or the originals (`use_orig_params`)."""
        flat = self._handle.flat_param
        return [flat] if flat._params is None else list(flat._params)

    def whole(self, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return something of each original parameter, gathered from all ranks; collective.

        of: returns a tensor of the size of what it is given, for example the gradient.
        """
        handle, flat = self._handle, self._handle.flat_param
        own = of(flat) if flat._params is None else self._of_views(of)
        if handle.uses_sharded_strategy:
            group = handle.process_group
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, own.contiguous(), group=group)
            own = torch.cat(parts)[: flat._unpadded_unsharded_size.numel()]
        return dict(zip(self.names, handle._get_unflat_views(own), strict=True))

    def _of_views(self, of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return this rank's shard, put together from the parts of the originals in it."""
        flat = self._handle.flat_param
        own = torch.zeros_like(flat.detach())
        for parameter, place in zip(flat._params, flat._shard_param_infos, strict=True):
            if place.in_shard:
                begin = place.offset_in_shard
                own[begin : begin + place.numel_in_shard] = of(parameter).reshape(-1)
        return own


def flat_parameters(model: nn.Module) -> list[FlatParameter]:
    """Return all flat parameters of a model; wrapping modules add words to the names."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415  (takes a while)

    handles = (
        (name, module._handle)
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None
    )
    return [
        FlatParameter([f"{name}.{each}".lstrip(".") for each in handle.flat_param._fqns], handle)
        for name, handle in handles
    ]
