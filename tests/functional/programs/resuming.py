"""Train, write checkpoints, and resume; `--lose` leaves something out of what is restored."""

import argparse
import copy
import os
import random
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

KINDS = ("plain", "schedule", "dropout", "scaler", "sampler", "average")
parser = argparse.ArgumentParser()
parser.add_argument("--kind", choices=KINDS, default="plain")
parser.add_argument("--lose", default="nothing")
parser.add_argument("--resume", type=Path)
parser.add_argument("--every", type=int, default=2)
parser.add_argument("--max-steps", type=int, default=20)
parser.add_argument("--share-batch", action="store_true")
options = parser.parse_args()
rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("gloo")
torch.manual_seed(3)
data = TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
norm = nn.Identity() if options.kind == "plain" else nn.BatchNorm1d(16)
dropout = nn.Dropout(0.3 if options.kind == "dropout" else 0)
model = nn.Sequential(nn.Linear(8, 16), norm, dropout, nn.Linear(16, 1))
average = copy.deepcopy(model).requires_grad_(False) if options.kind == "average" else None
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
uses_schedule = options.kind == "schedule"
scaler = torch.amp.GradScaler(
    "cpu", init_scale=64.0, growth_interval=2, enabled=options.kind == "scaler"
)
torch.manual_seed(10 + rank)  # dropout of each rank
random.seed(rank)
np.random.seed(rank)
done = 0
states = None


def checkpoint():
    return {
        "weights": model.state_dict(),
        "moments": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "scaler": scaler.state_dict(),
        "average": average and average.state_dict(),
        "done": done,
    }


def generator_file(folder):
    return folder / f"generator-{rank}.pt"


if options.resume:
    found = torch.load(options.resume, weights_only=True)
    weights = found["weights"]
    if options.lose == "weights":
        weights = torch.load("older.pt", weights_only=True)["weights"]
    model.load_state_dict(weights)
    if options.lose != "moments":
        optimizer.load_state_dict(found["moments"])
    if options.lose != "schedule":
        schedule.load_state_dict(found["schedule"])
    else:
        for group in optimizer.param_groups:
            group["lr"] = 0.01
    if options.lose != "scaler":
        scaler.load_state_dict(found["scaler"])
    if average and options.lose != "average":
        average.load_state_dict(found["average"])
    done = found["done"]
    if options.lose != "generator":
        states = torch.load(generator_file(Path()), weights_only=True)
net = DistributedDataParallel(model) if ranks > 1 else model
sampler = DistributedSampler(data, ranks, rank, shuffle=options.kind == "sampler")
size = 8 // ranks if options.share_batch else 8 // 2
loader = DataLoader(data, batch_size=size, sampler=sampler)
first_epoch = done // len(loader)
skipped = done % len(loader) if options.lose != "samples" else 0
for epoch in range(first_epoch, 9):
    if options.lose != "epoch":
        sampler.set_epoch(epoch)
    for place, (inputs, targets) in enumerate(loader):
        if place < skipped:
            continue
        skipped = 0
        if states is not None:
            torch.set_rng_state(states)
            states = None
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(net(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        if uses_schedule:
            schedule.step()
        if average:
            for mean, own in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(own.detach(), 0.1)
        done += 1
        if done % options.every == 0:
            if rank == 0:
                if Path("ckpt.pt").exists():
                    shutil.copy("ckpt.pt", "older.pt")
                torch.save(checkpoint(), "ckpt.pt")
            torch.save(torch.get_rng_state(), generator_file(Path()))
        if done == options.max_steps:
            break
    if done == options.max_steps:
        break
if ranks > 1:
    dist.destroy_process_group()
