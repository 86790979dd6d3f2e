"""Names of torch's FSDP without a stable public interface, which `import torch` does not load.

FSDP 1 (FullyShardedDataParallel) lays parameters into a flat one, which it shards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.nn import Parameter


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

    @property
    def leaf(self) -> Tensor:
        """Return the parameter that autograd knows."""
        flat: Tensor = self._handle.flat_param
        return flat

    @property
    def shards(self) -> int:
        handle = self._handle
        return dist.get_world_size(handle.process_group) if handle.uses_sharded_strategy else 1

    @property
    def shard(self) -> int:
        """Return the number of this rank's shard."""
        handle = self._handle
        return dist.get_rank(handle.process_group) if handle.uses_sharded_strategy else 0

    @property
    def shard_elements(self) -> int:
        flat = self._handle.flat_param
        size = flat._sharded_size if self._handle.uses_sharded_strategy else flat.shape
        return int(size.numel())

    @property
    def frozen(self) -> list[tuple[int, int]]:
        """Return the ranges of original parameters without a gradient, in the whole flat one.

        Autograd computes one for them, too, which FSDP drops.
        """
        flat = self._handle.flat_param
        found, begin = [], 0
        places = iter(flat._params or ())
        for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not is_padding:
                parameter = next(places, None)
                if parameter is not None and not parameter.requires_grad:
                    found.append((begin, begin + numel))
            begin += numel
        return found

    def own(self, of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return something of this rank's shard."""
        flat = self._handle.flat_param
        return of(flat) if flat._params is None else self._of_views(of)

    def whole(self, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return something of each original parameter, gathered from all ranks; collective.

        of: returns a tensor of the size of what it is given, for example the gradient.
        """
        handle, flat = self._handle, self._handle.flat_param
        own = self.own(of)
        if handle.uses_sharded_strategy:
            group = handle.process_group
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, own.contiguous(), group=group)
            own = torch.cat(parts)[: flat._unpadded_unsharded_size.numel()]
        return dict(zip(self.names, handle._get_unflat_views(own), strict=True))

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Set this rank's shard to its part of the original parameters, if all of them are given.

        Their names are those of this flat parameter, and their values are whole.
        """
        flat = self._handle.flat_param
        shapes = zip(self.names, flat._shapes, strict=True)
        if any(name not in tensors or tensors[name].shape != shape for name, shape in shapes):
            return
        values = iter(self.names)
        parts = [
            torch.zeros(numel) if is_padding else tensors[next(values)].reshape(-1)
            for numel, is_padding in zip(
                flat._numels_with_padding, flat._is_padding_mask, strict=True
            )
        ]
        begin = self.shard * self.shard_elements
        part = torch.cat(parts)[begin : begin + self.shard_elements]
        flat.data[: len(part)].copy_(part)

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


__all__ = ["AllGather", "ReduceScatter", "unsharded_parameters"]


def unsharded_parameters(model: nn.Module) -> Iterator[tuple[Parameter, Parameter]]:
    """Yield each sharded parameter with the whole one that forward passes use, if there is one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in groups:
                for each in () if group is None else group.fsdp_params:
                    whole = getattr(each, "_unsharded_param", None)
                    if whole is not None:
                        yield each.sharded_param, whole
