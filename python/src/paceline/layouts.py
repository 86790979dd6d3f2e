"""Distribute a module by a layout that is named in one string, on CPUs and GPUs.

    model = paceline.layouts.distribute(model, options.layout)

A layout is one way to distribute, and modifiers behind plus signs:

- `ddp`: every rank has the whole model; gradients are averaged (DistributedDataParallel).
- `fsdp`: parameters, gradients and optimiser state are sharded over all ranks (fully_shard).
- `hsdp:N`: sharded over groups of N ranks, and replicated between the groups.
- `tp`: layers are divided over all ranks by a plan (parallelize_module).
- `+checkpoint`: activations of blocks are computed again in the backward pass.
- `+compile`: blocks are compiled (torch.compile).

With one process only modifiers have an effect. Blocks are the modules of the longest
`nn.ModuleList` or `nn.Sequential`; without any, the children of the module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from paceline.errors import UsageError

WAYS = ("ddp", "fsdp", "hsdp:N", "tp")
MODIFIERS = ("checkpoint", "compile")


def distribute(
    module: nn.Module, layout: str, *, plan: Mapping[str, ParallelStyle] | None = None
) -> nn.Module:
    """Return the module in a layout; call it before the optimiser is made.

    The default process group must be open if there are several ranks. plan: of `tp`, by the names
    of modules. Raises UsageError for an unknown layout, or one that does not fit the ranks.
    """
    way, *modifiers = layout.split("+")
    unknown = sorted(set(modifiers) - set(MODIFIERS))
    if unknown or way.partition(":")[0] not in {each.partition(":")[0] for each in WAYS}:
        raise UsageError(
            f"layout {layout!r}: expected one of {', '.join(WAYS)}, and modifiers of "
            f"{', '.join(f'+{each}' for each in MODIFIERS)}"
        )
    if "checkpoint" in modifiers:
        for block in blocks_of(module):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if "compile" in modifiers:
        for block in blocks_of(module):
            block.compile()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return module if ranks == 1 else _distributed(module, way, ranks, plan)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model, which are sharded, computed again or compiled one by one."""
    lists = [
        list(each.children())
        for each in module.modules()
        if isinstance(each, nn.ModuleList | nn.Sequential)
    ]
    found: Sequence[nn.Module] = max(lists, key=len, default=list(module.children()))
    return [block for block in found if next(block.parameters(), None) is not None]


def _distributed(
    module: nn.Module, way: str, ranks: int, plan: Mapping[str, ParallelStyle] | None
) -> nn.Module:
    device = next(module.parameters()).device.type
    if way == "ddp":
        return DistributedDataParallel(module)
    if way == "tp":
        if plan is None:
            raise UsageError("layout tp: expected a plan of ParallelStyles by names of modules")
        return parallelize_module(module, init_device_mesh(device, (ranks,)), dict(plan))
    mesh = _mesh(device, way, ranks)
    for block in blocks_of(module):
        fully_shard(block, mesh=mesh)
    return cast("nn.Module", fully_shard(module, mesh=mesh))


def _mesh(device: str, way: str, ranks: int) -> DeviceMesh:
    """Return all ranks in one dimension, or in groups that hold the whole model each."""
    name, _, number = way.partition(":")
    if name == "fsdp":
        return init_device_mesh(device, (ranks,))
    shards = int(number) if number.isdecimal() else 0
    if not shards or ranks % shards:
        raise UsageError(f"layout {way}: expected hsdp:N where N divides the {ranks} ranks")
    names: Any = ("replicate", "shard")
    return init_device_mesh(device, (ranks // shards, shards), mesh_dim_names=names)
