"""Run by mpirun with two ranks: torch's ways to train over our back ends, against one process.

usage: mpi_training.py TRANSPORT FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import paceline.distributed  # (back end "paceline")
import paceline.mpi  # noqa: F401  (back end "mpi4py", and where the ranks meet)

BATCH, WIDTH, STEPS, RATE = 8, 6, 3, 0.1
Weights = dict[str, torch.Tensor]


def build() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2)
    )


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    shapes = (BATCH, WIDTH), (BATCH, 2)
    inputs, targets = (torch.randn(shape, generator=generator) for shape in shapes)
    return inputs, targets


def own_half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def steps(model: nn.Module, optimizer: Any, share: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for step in range(STEPS):
        inputs, targets = map(share, samples(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def alone() -> Weights:
    model = build()
    steps(model, torch.optim.Adam(model.parameters(), RATE), lambda whole: whole)
    return model.state_dict()


def with_ddp() -> Weights:
    model = DistributedDataParallel(build())
    steps(model, torch.optim.Adam(model.parameters(), RATE), own_half)
    return model.module.state_dict()


def with_zero() -> Weights:
    model = DistributedDataParallel(build())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=RATE)
    steps(model, optimizer, own_half)
    return model.module.state_dict()


def with_fully_shard() -> Weights:
    model = build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    steps(model, torch.optim.Adam(model.parameters(), RATE), own_half)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def with_fsdp() -> Weights:
    model = FullyShardedDataParallel(build(), device_id=torch.device("cpu"), use_orig_params=True)
    steps(model, torch.optim.Adam(model.parameters(), RATE), own_half)
    with FullyShardedDataParallel.summon_full_params(model):
        return {name: value.clone() for name, value in model.module.state_dict().items()}


def with_pipeline() -> Weights:
    """Two stages, four micro-batches; each rank has its own stage's weights only."""
    model, rank = build(), dist.get_rank()
    part = model[:2] if rank == 0 else model[2:]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(part.parameters(), RATE)
    for step in range(STEPS):
        inputs, targets = samples(step)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets)
        optimizer.step()
    return part.state_dict()


WAYS: dict[str, Callable[[], Weights]] = {
    "ddp": with_ddp, "zero": with_zero, "fully_shard": with_fully_shard, "fsdp": with_fsdp,
    "pipeline": with_pipeline,
}  # fmt: skip


def compared(way: str) -> dict[str, Any]:
    """How far from one process's weights this way ends, and how far those have moved at least."""
    found, wanted, first = WAYS[way](), alone(), build().state_dict()
    return {
        "names": sorted(found),
        "difference": max(float((found[n] - wanted[n]).abs().max()) for n in found),
        "moved": min(float((wanted[n] - first[n]).abs().max()) for n in found),
    }


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    backend = "paceline" if sys.argv[1] == "paceline" else "mpi4py"
    dist.init_process_group(backend, timeout=timedelta(seconds=20))
    for way in WAYS:
        file = folder / f"{way}.{dist.get_rank()}.json"
        file.write_text(json.dumps(compared(way)))
    dist.destroy_process_group()


main()
