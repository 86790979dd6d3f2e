"""Train with DDP whose buckets are reduced in place, and by hand.

usage: in_place.py TRANSPORT FOLDER BACKEND     (as one of the ranks that mpirun starts)

Writes FOLDER/in_place.RANK.json: the largest difference of a gradient, and how many tensors of
others are mapped.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline.distributed  # (back end "paceline")
import paceline.mpi  # noqa: F401  (where the ranks meet)
from paceline.collectives.in_place import share_buckets

WIDTH, ROWS, STEPS = 700, 4, 4  # 2 MB of weights in each layer


def made_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def rows(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator)


def main() -> None:
    torch.set_num_threads(1)
    _, folder, backend = sys.argv[1:]
    dist.init_process_group(backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel = DistributedDataParallel(made_model(), bucket_cap_mb=1, gradient_as_bucket_view=True)
    share_buckets(parallel)
    alone = made_model()
    largest = 0.0
    for step in range(STEPS):
        parallel.zero_grad()
        alone.zero_grad()
        parallel(rows(rank, step)).square().mean().backward()
        alone(torch.cat([rows(other, step) for other in range(ranks)])).square().mean().backward()
        for ours, theirs in zip(parallel.parameters(), alone.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            largest = max(largest, float((ours.grad - theirs.grad).abs().max()))
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "torch_" in line]
    found = {"largest": largest, "others": sum(" r--s " in line for line in mapped)}
    (Path(folder) / f"in_place.{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
