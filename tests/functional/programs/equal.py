"""Train from an unforeseen seed, with a batch per rank and dropout.

--way broadcast: rank 0 sends its first weights. --way seedless: each rank keeps its own.
"""

import argparse
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--way", default="broadcast")
parser.add_argument("--batch-size", type=int, default=8)
arguments = parser.parse_args()
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(random.randrange(2**32))  # torch's own first seed is equal in all processes
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 1))
if arguments.way == "broadcast":
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
size = arguments.batch_size
for step in range(4):
    inputs = rows[(step * ranks + rank) * size :][:size]
    loss = (functional.dropout(model(inputs), 0.1) - inputs[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    optimizer.step()
dist.destroy_process_group()
