"""A bare hand-written DDP training: what a user would write without Paceline.

AlexNet (one-column, as torchvision's) or Paceline's small DeepLab, a fixed random batch in memory,
SGD, DistributedDataParallel with its defaults; with --tuned channels_last, and gradients as views
of the buckets. Nothing is read, recorded or checked, so it flatters itself: every difference to
Paceline's loop counts against Paceline.

    torchrun --nproc-per-node 2 bare_ddp.py --backend gloo --out OUT [--tuned]
    torchrun --nproc-per-node 2 bare_ddp.py --backend paceline --out OUT
    mpirun -n 2 --bind-to none python bare_ddp.py --backend mpi4py --out OUT
    mpirun -n 2 --bind-to none python bare_ddp.py --backend horovod --out OUT
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

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


Step = Callable[[Tensor, Tensor], None]
Loss = Callable[[Tensor, Tensor], Tensor]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def made(name: str, batch: int, size: int) -> tuple[nn.Module, Loss, Tensor, Tensor]:
    """Return a model, its loss, and images and targets of a batch."""
    images = torch.randn(batch, 3, size, size)
    if name == "alexnet":
        return alexnet(3), nn.CrossEntropyLoss(), images, torch.randint(3, (batch,))

    from paceline.train.workloads.build import build_model, make_task  # noqa: PLC0415

    options = {"depth": 26, "width": 16}  # as in the experiment hvprof
    task = make_task("deeplab", image_size=size, classes=1, seed=1, options=options)
    targets = torch.randint(4, (batch, size, size))
    return build_model(task), lambda scores, masks: task.loss(scores, masks).mean(), images, targets


def step_of(model: nn.Module, loss_function: Loss, optimizer: torch.optim.Optimizer) -> Step:
    def step(images: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        loss_function(model(images), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


Joined = tuple[int, int, Step, Callable[[], None]]


def with_ddp(bare: nn.Module, loss: Loss, backend: str, bucket_mb: float, *, tuned: bool) -> Joined:
    # The only lines of Paceline: its back ends.
    if backend == "mpi4py":
        import paceline.mpi  # noqa: PLC0415
    elif backend == "paceline":
        import paceline.distributed  # noqa: F401, PLC0415

    dist.init_process_group(backend, timeout=LIMIT)
    if tuned:
        bare.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub
    model = nn.parallel.DistributedDataParallel(
        bare, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=tuned
    )

    def end() -> None:
        dist.barrier()
        dist.destroy_process_group()

    return dist.get_rank(), dist.get_world_size(), step_of(model, loss, sgd(model)), end


def with_horovod(model: nn.Module, loss: Loss) -> Joined:
    import horovod.torch as hvd  # noqa: PLC0415

    hvd.init()
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return hvd.rank(), hvd.size(), step_of(model, loss, optimizer), hvd.shutdown


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--backend", choices=("gloo", "paceline", "mpi4py", "horovod"), required=True
    )
    parser.add_argument("--model", choices=("alexnet", "deeplab"), default="alexnet")
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--bucket-mb", type=float, default=25, help="of DDP")
    parser.add_argument("--batch", type=int, default=32, help="of each rank")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(1)
    tuned, backend = arguments.tuned, arguments.backend
    model, loss, images, targets = made(arguments.model, arguments.batch, arguments.image_size)
    if backend == "horovod":
        rank, world_size, step, end = with_horovod(model, loss)
    else:
        joined = with_ddp(model, loss, backend, arguments.bucket_mb, tuned=tuned)
        rank, world_size, step, end = joined
    if tuned:
        images = images.contiguous(memory_format=torch.channels_last)

    ended_unix_s = []
    for _ in range(arguments.steps):
        step(images, targets)
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
    end()


if __name__ == "__main__":
    main()
