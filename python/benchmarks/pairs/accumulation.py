"""Gradients of several passes that are put together wrongly.

torchrun --nproc-per-node 2 accumulation.py --bug not-divided [--fixed]
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from utils import Classifier, loader, mlp, ranks, run, table

PASSES = 2


def batches():
    return loader(table(128), batch=8)


def not_divided(wrong):
    """Losses of passes are not divided by their number."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for number, (inputs, labels) in enumerate(batches()):
        loss = cross_entropy(net(inputs), labels)
        (loss if wrong else loss / PASSES).backward()
        if number % PASSES == PASSES - 1:
            optimizer.step()
            optimizer.zero_grad()


def first_pass_only(wrong):
    """DDP exchanges in the first pass of a step in place of the last one."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for number, (inputs, labels) in enumerate(batches()):
        is_exchanged = number % PASSES == (0 if wrong else PASSES - 1)
        with nullcontext() if is_exchanged else net.no_sync():
            (cross_entropy(net(inputs), labels) / PASSES).backward()
        if number % PASSES == PASSES - 1:
            optimizer.step()
            optimizer.zero_grad()


def reduced_again(wrong):
    """Gradients are reduced after each pass that adds to them."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number, (inputs, labels) in enumerate(batches()):
        is_last = number % PASSES == PASSES - 1
        (cross_entropy(model(inputs), labels) / PASSES).backward()
        if is_last or wrong:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        if is_last:
            for parameter in model.parameters():
                parameter.grad /= ranks()
            optimizer.step()
            optimizer.zero_grad()


def divided_by_all(wrong):
    """Losses are divided by the passes of all ranks, and DDP averages them, too."""
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number, (inputs, labels) in enumerate(batches()):
        passes = PASSES * (ranks() if wrong else 1)
        (cross_entropy(net(inputs), labels) / passes).backward()
        if number % PASSES == PASSES - 1:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    run(__doc__, not_divided, first_pass_only, reduced_again, divided_by_all)
