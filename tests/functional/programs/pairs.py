"""Train by hand-written data parallelism, right or with --wrong yes, in a case that looks odd.

moments: rows are normalised by running moments, with a fault by those of each rank's own rows.
uneven: the last batch has three rows, with a fault averaged without weights.
dropout: after the last module; with a fault gradients are summed.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("case")
parser.add_argument("--wrong", default="no")
arguments = parser.parse_args()
case, is_wrong = arguments.case, arguments.wrong == "yes"
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
count, total = torch.zeros(1), torch.zeros(8)
for batch in torch.randn(6 * 8 + 3 * (case == "uneven"), 8).split(8):
    rows = batch[rank::ranks]
    inputs = rows
    if case == "moments":
        new = torch.cat([torch.full((1,), float(len(rows))), rows.sum(0)])
        if not is_wrong:
            dist.all_reduce(new)
        count, total = count + new[:1], total + new[1:]
        inputs = rows - total / count
    outputs = model(inputs)
    if case == "dropout":
        outputs = functional.dropout(outputs, 0.4)
    loss = (outputs - rows[:, :1]).square().mean()
    if not is_wrong:
        loss = loss * len(rows) * ranks / len(batch)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 1 if is_wrong and case == "dropout" else ranks
    optimizer.step()
dist.destroy_process_group()
