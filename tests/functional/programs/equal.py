"""Train from an unforeseen seed, with a batch per rank and dropout.

--way broadcast: rank 0 sends its first weights. seedless: each rank keeps its own; sum: gradients
are summed; ddp, fsdp, fsdp1: in a wrapper; refusing: not in one process.
"""

import argparse
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--way", default="broadcast")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--dropout", type=float, default=0.5)
arguments = parser.parse_args()
way, size = arguments.way, arguments.batch_size
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
if way == "refusing" and ranks == 1:
    raise SystemExit("expected several ranks")
torch.manual_seed(random.randrange(2**32))  # torch's own first seed is equal in all processes
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(arguments.dropout), nn.ReLU(), nn.Linear(16, 1))
if way != "seedless":
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
network = model
if ranks > 1 and way == "ddp":
    network = DistributedDataParallel(model)
elif ranks > 1 and way == "fsdp":
    network = fully_shard(model)
elif ranks > 1 and way == "fsdp1":
    network = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
torch.manual_seed(1 + rank)  # of dropout
rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
for step in range(4):
    inputs = rows[(step * ranks + rank) * size :][:size]
    outputs = functional.dropout(network(inputs), arguments.dropout / 5)
    loss = (outputs - inputs[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if ranks > 1 and way not in ("ddp", "fsdp", "fsdp1"):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 1 if way == "sum" else ranks
    optimizer.step()
dist.destroy_process_group()
