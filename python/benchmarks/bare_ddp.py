"""A bare hand-written DDP training: what a user would write without Paceline.

AlexNet (one-column, as torchvision's), a fixed random batch in memory, SGD, DistributedDataParallel
with its defaults. Nothing is read, recorded or checked, so it flatters itself: every difference to
Paceline's loop counts against Paceline.

    torchrun --nproc-per-node 2 bare_ddp.py --backend gloo --out OUT
    mpirun -n 2 --bind-to none python bare_ddp.py --backend mpi4py --out OUT
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

LIMIT = timedelta(seconds=120)


def alexnet(classes: int) -> nn.Module:
    features = nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d((6, 6)),
    )
    classifier = nn.Sequential(
        nn.Dropout(),
        nn.Linear(256 * 6 * 6, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, classes),
    )
    return nn.Sequential(features, nn.Flatten(), classifier)


def join(backend: str) -> tuple[int, int]:
    if backend == "mpi4py":
        # the only line of Paceline: its backend, registered by importing it
        from paceline.train.collectives.mpi import transport as mpi  # noqa: PLC0415

        mpi.init_process_group(timeout=LIMIT)
    else:
        dist.init_process_group(backend, timeout=LIMIT)
    return dist.get_rank(), dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=("gloo", "mpi4py"), required=True)
    parser.add_argument("--batch", type=int, default=32, help="of each rank")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(1)
    rank, world_size = join(arguments.backend)
    model = nn.parallel.DistributedDataParallel(alexnet(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    loss_function = nn.CrossEntropyLoss()
    size = arguments.image_size
    images = torch.randn(arguments.batch, 3, size, size)
    labels = torch.randint(3, (arguments.batch,))

    ended_unix_s = []
    for _ in range(arguments.steps):
        optimizer.zero_grad()
        loss_function(model(images), labels).backward()
        optimizer.step()
        ended_unix_s.append(time.time())

    arguments.out.mkdir(parents=True, exist_ok=True)
    row = {
        "rank": rank,
        "world_size": world_size,
        "batch": arguments.batch,
        "pid": os.getpid(),
        "step_ended_unix_s": ended_unix_s,
    }
    (arguments.out / f"rank{rank}.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
