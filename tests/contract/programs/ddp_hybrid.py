"""Run by mpirun: train a model with DDP, plain and with paceline.with_factors; leave both weights.

usage: ddp_hybrid.py gloo FOLDER

FOLDER/RANK.json: the choice, and the error of a step with too many samples.
FOLDER/RANK.safetensors: weights with the prefixes "plain/" and "hybrid/".
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
from ranks import make_context

import paceline
from paceline.base.errors import UsageError
from paceline.train.rank.peers import open_store

LIMIT_S = 20.0
SAMPLES = 4  # of a rank in an optimiser step, at most
# Samples of each pass of each rank in a step; the last one of several passes synchronises.
STEPS = [[[4], [4]], [[2, 2], [2, 2]], [[3], [2]], [[2, 1], [1, 2]], [[4], [4]]]


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 32), nn.ReLU(),
        nn.Linear(32, 3, bias=False),
    )  # fmt: skip


def inputs_of(step: int, rank: int, sizes: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(size, 3, 8, 8, generator=generator) for size in sizes]


def train(model: DistributedDataParallel, rank: int) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, sizes in enumerate(STEPS):
        optimizer.zero_grad()
        *first, last = inputs_of(step, rank, sizes[rank])
        for inputs in (*first, last):
            is_last = inputs is last
            with contextlib.nullcontext() if is_last else model.no_sync():
                (model(inputs).square().sum() / SAMPLES).backward()
        optimizer.step()
        model(inputs_of(step, 9, [4])[0])  # a validation that forgets torch.no_grad
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    context = make_context(folder)
    store = open_store(context, LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
    plain = train(DistributedDataParallel(make_model()), context.rank)
    example = torch.zeros(1, 3, 8, 8)
    wrapped = DistributedDataParallel(make_model())
    model = paceline.with_factors(wrapped, example, samples=SAMPLES, setting="always")
    del wrapped
    hybrid = train(model, context.rank)
    try:
        model(torch.zeros(SAMPLES + 1, 3, 8, 8)).sum().backward()
        error = None
    except UsageError as refused:
        error = str(refused)
    left = {f"plain/{n}": t for n, t in plain.items()} | {
        f"hybrid/{n}": t for n, t in hybrid.items()
    }
    save_file(left, folder / f"{context.rank}.safetensors")
    said = {"choice": model.sufficient_factors, "error": error}
    (folder / f"{context.rank}.json").write_text(json.dumps(said))
    # Its reducer holds the process group. If that is freed with the model at the end of this
    # function, torch waits for Gloo's thread and keeps the interpreter lock, which the thread may
    # need to free its last tensors: one of 80 processes hung on busy cores.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
