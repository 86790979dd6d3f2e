"""Train by hand-written data parallelism; each way allows another statement of `verify`."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--way", default="mean")
way = parser.parse_args().way
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
if way in ("own-rows", "sum-of-rows"):
    torch.manual_seed(1 + rank)
for step in range(6):
    batch = torch.randn(8, 8)
    inputs = batch if way in ("own-rows", "sum-of-rows") else batch[rank::ranks]
    errors = (model(inputs) - inputs[:, :1]).square()
    loss = errors.sum() if way == "sum-of-rows" else errors.mean()
    optimizer.zero_grad()
    loss.backward()
    if way != "local":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            is_sum = way == "sum" or (way == "sum-at-the-end" and step == 5)
            parameter.grad /= 1 if is_sum else ranks
    optimizer.step()
    if way == "local" and step % 2:
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= ranks
dist.destroy_process_group()
