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


class Inside(nn.Module):
    """Goes backward within its own forward pass, as frameworks do that call a user's step."""

    def __init__(self):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        outputs = self.model(inputs)
        (outputs - inputs[:, :1]).square().mean().backward()
        return outputs


class MeanOverRanks(torch.autograd.Function):
    """The mean of a number of each rank; its gradient is that of the rank's own one."""

    @staticmethod
    def forward(_ctx, number):
        mean = number / ranks
        dist.all_reduce(mean)
        return mean

    @staticmethod
    def backward(_ctx, gradient):
        return gradient


inside = Inside()
has_own_rows = way in (
    *("own-rows", "inside", "sum-of-rows", "pairs", "correlation"),
    *("loss-of-ranks", "square-of-loss"),
)
if has_own_rows:
    torch.manual_seed(1 + rank)
for step in range(6):
    batch = torch.randn(8, 8)
    inputs = batch if has_own_rows else batch[rank::ranks]
    optimizer.zero_grad()
    outputs = (inside if way == "inside" else model)(inputs)
    errors = (outputs - inputs[:, :1]).square()
    loss = errors.sum() if way == "sum-of-rows" else errors.mean()
    if way == "pairs":
        loss = nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))
    elif way == "correlation":
        correlation = outputs.T @ outputs / len(outputs) / ranks
        dist.all_reduce(correlation)
        loss = (correlation - 1).square().sum()
    elif way in ("loss-of-ranks", "square-of-loss"):
        loss = MeanOverRanks.apply(loss)
        loss = loss.square() if way == "square-of-loss" else loss
    if way != "inside":
        loss.backward()
    if way not in ("local", "rarely"):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            is_sum = way == "sum" or (way == "sum-at-the-end" and step == 5)
            parameter.grad /= 1 if is_sum else ranks
    optimizer.step()
    if (way == "local" and step % 2) or (way == "rarely" and step == 4):
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= ranks
dist.destroy_process_group()
