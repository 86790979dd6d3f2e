"""Distribute a module by a layout that is named in one string, on CPUs and GPUs.

    model = distribute(model, options.layout)
    ...
    loss = forward_backward(model, inputs, targets, cross_entropy)

It uses torch alone, and works on its own: copy it beside a script.

A layout is one way to distribute, and modifiers behind plus signs:

- `ddp`: every rank has the whole model; gradients are averaged (DistributedDataParallel).
- `fsdp`: parameters, gradients and optimiser state are sharded over all ranks (fully_shard).
- `hsdp:N`: sharded over groups of N ranks, and replicated between the groups.
- `tp`: layers are divided over all ranks by a plan (parallelize_module).
- `pipeline:M`: each rank has a stage, a part of the blocks; a batch passes through the stages in M
  micro-batches, as many as ranks without a number (torch.distributed.pipelining, 1F1B).
- `+checkpoint`: activations of blocks are computed again in the backward pass.
- `+compile`: blocks are compiled (torch.compile).

`pipeline` has no modifiers. With one process only modifiers have an effect. Blocks are the modules
of the longest `nn.ModuleList` or `nn.Sequential`; without any, the children of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

WAYS = ("ddp", "fsdp", "hsdp:N", "tp", "pipeline:M")
MODIFIERS = ("checkpoint", "compile")
# Mean loss over the samples of outputs and targets.
Loss = Callable[[Tensor, Tensor], Tensor]


def distribute(
    module: nn.Module,
    layout: str,
    *,
    plan: Mapping[str, ParallelStyle] | None = None,
    example: Tensor | None = None,
) -> nn.Module:
    """Return the module in a layout; call it before the optimiser is made.

    The default process group must be open if there are several ranks. plan: of `tp`, by the names
    of modules. example: of `pipeline`, the input of a batch, whose size all batches have. Raises
    ValueError for an unknown layout, or one that does not fit the ranks or the model.
    """
    way, *modifiers = layout.split("+")
    unknown = sorted(set(modifiers) - set(MODIFIERS))
    if unknown or way.partition(":")[0] not in {each.partition(":")[0] for each in WAYS}:
        raise ValueError(
            f"layout {layout!r}: expected one of {', '.join(WAYS)}, and modifiers of "
            f"{', '.join(f'+{each}' for each in MODIFIERS)}"
        )
    if way.startswith("pipeline") and modifiers:
        raise ValueError(f"layout {layout!r}: expected pipeline without modifiers")
    if "checkpoint" in modifiers:
        for block in blocks_of(module):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if "compile" in modifiers:
        for block in blocks_of(module):
            block.compile()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1:
        return module
    if way.startswith("pipeline"):
        return Stage(module, way, ranks, example)
    return _distributed(module, way, ranks, plan)


def forward_backward(
    model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss
) -> Tensor | None:
    """Add the gradient of the loss of a batch, in every layout; return the loss.

    With `pipeline` every rank is given the whole batch, and only the last one returns the loss.
    Raises ValueError for a batch that does not fit the pipeline.
    """
    if isinstance(model, Stage):
        return model.forward_backward(inputs, targets, loss)
    value = loss(model(inputs), targets)
    value.backward()
    return value.detach()


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
            raise ValueError("layout tp: expected a plan of ParallelStyles by names of modules")
        return parallelize_module(module, init_device_mesh(device, (ranks,)), dict(plan))
    mesh = _mesh(device, way, ranks)
    for block in blocks_of(module):
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def _mesh(device: str, way: str, ranks: int) -> DeviceMesh:
    """Return all ranks in one dimension, or in groups that hold the whole model each."""
    name, _, number = way.partition(":")
    if name == "fsdp":
        return init_device_mesh(device, (ranks,))
    shards = int(number) if number.isdecimal() else 0
    if not shards or ranks % shards:
        raise ValueError(f"layout {way}: expected hsdp:N where N divides the {ranks} ranks")
    shape, names = (ranks // shards, shards), ("replicate", "shard")
    return init_device_mesh(device, shape, mesh_dim_names=names)


class Stage(nn.Module):
    """The part of a model that this rank has in a pipeline over all ranks."""

    def __init__(self, module: nn.Module, way: str, ranks: int, example: Tensor | None) -> None:
        super().__init__()
        # its import takes as long as that of torch's compiler
        from torch.distributed.pipelining import (  # noqa: PLC0415
            Schedule1F1B,
            SplitPoint,
            pipeline,
        )

        _, _, number = way.partition(":")
        self._parts = int(number) if number.isdecimal() else 0 if number else ranks
        self._is_first, self._is_last = dist.get_rank() == 0, dist.get_rank() == ranks - 1
        check_pipeline(module, way, self._parts, ranks, example)
        assert example is not None
        self._batch = len(example)
        starts = dict.fromkeys(first_blocks(module, ranks), SplitPoint.BEGINNING)
        micro_batch = example[: self._batch // self._parts]
        divided = pipeline(module, mb_args=(micro_batch,), split_spec=starts)
        stage = divided.build_stage(dist.get_rank(), next(module.parameters()).device)
        self.module = stage.submod
        self._loss: Loss = nn.functional.mse_loss  # of the batch that is under way
        # Each micro-batch has an equal share of the mean. The schedule itself would also divide
        # gradients that were there before.
        self._schedule = Schedule1F1B(
            stage,
            self._parts,
            loss_fn=lambda outputs, targets: self._loss(outputs, targets) / self._parts,
            scale_grads=False,
        )

    def forward_backward(self, inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor | None:
        """Add the gradient of a batch; return its loss on the last rank."""
        if len(inputs) != self._batch:
            raise ValueError(
                f"layout pipeline: expected a batch of {self._batch} samples as in the example, "
                f"got {len(inputs)}"
            )
        self._loss = loss
        losses: list[Tensor] = []
        arguments = (inputs,) if self._is_first else ()
        if not self._is_last:
            self._schedule.step(*arguments)
            return None
        self._schedule.step(target=targets, losses=losses)
        return torch.stack(losses).sum().detach()


def first_blocks(module: nn.Module, ranks: int) -> list[str]:
    """Return the names of the blocks with which all stages but the first begin."""
    blocks = blocks_of(module)
    names = {id(each): name for name, each in module.named_modules()}
    return [names[id(blocks[len(blocks) * rank // ranks])] for rank in range(1, ranks)]


def check_pipeline(
    module: nn.Module, way: str, parts: int, ranks: int, example: Tensor | None
) -> None:
    """Raise ValueError if a pipeline of so many ranks cannot process a batch in so many parts."""
    blocks = len(blocks_of(module))
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    faults = (
        (example is None, "an example of the input"),
        (parts < ranks, f"at least {ranks} micro-batches, one for each rank"),
        (blocks < ranks, f"at least {ranks} blocks, the model has {blocks}"),
        (
            len(names) > len(list(module.parameters())),
            "no tied parameters, because their gradients would not be summed",
        ),
        (
            example is not None and parts and len(example) % parts,
            f"a batch that {parts} micro-batches divide",
        ),
    )
    for is_wrong, expected in faults:
        if is_wrong:
            raise ValueError(f"layout {way}: expected {expected}")
