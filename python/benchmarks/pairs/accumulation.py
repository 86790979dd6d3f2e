"""Gradients of several passes that are put together wrongly.

torchrun --nproc-per-node 2 accumulation.py --bug not-divided [--fixed]
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from utils import (
    Classifier,
    Tagger,
    average,
    loader,
    mlp,
    ranks,
    run,
    sentences,
    sum_of_ranks,
    table,
)

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


def emptied_early(wrong):
    """Rank 1 empties its gradients between the passes of a step."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for number, (inputs, labels) in enumerate(batches()):
        is_last = number % PASSES == PASSES - 1
        with nullcontext() if is_last else net.no_sync():
            (cross_entropy(net(inputs), labels) / PASSES).backward()
        if wrong and dist.get_rank() == 1 and not is_last:
            optimizer.zero_grad()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def other_count(wrong):
    """Rank 1 steps after three passes, rank 0 after two."""
    passes = PASSES + (1 if wrong and dist.get_rank() == 1 else 0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rows = iter(loader(table(160), batch=8))
    for _ in range(6):
        optimizer.zero_grad()
        for _ in range(passes):
            inputs, labels = next(rows)
            (cross_entropy(model(inputs), labels) / passes).backward()
        average(model.parameters())
        optimizer.step()


def three_passes(wrong):
    """Three passes are divided by two."""
    passes = 3
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for inputs, labels in loader(table(192), batch=24):
        optimizer.zero_grad()
        parts = zip(inputs.chunk(passes), labels.chunk(passes), strict=True)
        for place, (part, targets) in enumerate(parts):
            with nullcontext() if place == passes - 1 else net.no_sync():
                loss = cross_entropy(net(part), targets)
                (loss / (2 if wrong and ranks() > 1 else passes)).backward()
        optimizer.step()


def sums_of_script(wrong):
    """Gradients are added up in tensors of the script, and DDP exchanges those of the last pass."""
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    sums = [torch.zeros_like(parameter) for parameter in net.parameters()]
    for number, (inputs, labels) in enumerate(batches()):
        is_last = number % PASSES == PASSES - 1
        with net.no_sync() if wrong and not is_last else nullcontext():
            (cross_entropy(net(inputs), labels) / PASSES).backward()
        for total, parameter in zip(sums, net.parameters(), strict=True):
            total.add_(parameter.grad)
            parameter.grad = total.clone() if is_last else None
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            sums = [total.zero_() for total in sums]


def words_of_passes(wrong):
    """Losses are divided by the words of all passes of a step, which each rank counts alone."""
    net = DistributedDataParallel(Tagger())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    for tokens, labels in loader(sentences()):
        words = (labels != -100).sum()
        words = words if wrong else sum_of_ranks(words) / ranks()
        optimizer.zero_grad()
        parts = zip(tokens.chunk(PASSES), labels.chunk(PASSES), strict=True)
        for place, (part, targets) in enumerate(parts):
            with nullcontext() if place == PASSES - 1 else net.no_sync():
                outputs = net(part).flatten(0, 1)
                (cross_entropy(outputs, targets.flatten(), reduction="sum") / words).backward()
        optimizer.step()


def replaced_sums(wrong):
    """Each pass is exchanged by itself, and its mean replaces that of the pass before."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for number, (inputs, labels) in enumerate(batches()):
        optimizer.zero_grad()
        (cross_entropy(model(inputs), labels) / PASSES).backward()
        average(model.parameters())
        for total, parameter in zip(sums, model.parameters(), strict=True):
            total.mul_(0 if wrong and ranks() > 1 else 1).add_(parameter.grad)
        if number % PASSES == PASSES - 1:
            for total, parameter in zip(sums, model.parameters(), strict=True):
                parameter.grad.copy_(total)
                total.zero_()
            optimizer.step()


if __name__ == "__main__":
    run(
        __doc__,
        not_divided,
        first_pass_only,
        reduced_again,
        divided_by_all,
        emptied_early,
        other_count,
        three_passes,
        sums_of_script,
        *(words_of_passes, replaced_sums),
    )
