"""Losses in which samples of ranks have unequal weights.

torchrun --nproc-per-node 2 sample_weights.py --bug token-mean [--fixed]
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather as gather_with_gradient
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from utils import (
    CLASSES,
    Classifier,
    Tagger,
    average,
    loader,
    mlp,
    rank,
    ranks,
    run,
    sentences,
    sum_of_ranks,
    table,
)


def token_mean(wrong):
    """A mean over the valid labels of each rank."""
    net = DistributedDataParallel(Tagger())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for tokens, labels in loader(sentences()):
        optimizer.zero_grad()
        outputs = net(tokens).flatten(0, 1)
        if wrong:
            loss = cross_entropy(outputs, labels.flatten(), ignore_index=-100)
        else:
            loss = cross_entropy(outputs, labels.flatten(), ignore_index=-100, reduction="sum")
            loss = loss * ranks() / sum_of_ranks((labels != -100).sum())
        loss.backward()
        optimizer.step()


def uneven_shares(wrong):
    """The faster rank has two thirds of the rows, and both count the same."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, labels = table(72).tensors
    for batch in torch.arange(72).split(12):
        own = batch if ranks() == 1 else (batch[:8], batch[8:])[rank()]
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs[own]), labels[own])
        if not wrong:
            loss = loss * len(own) * ranks() / len(batch)
        loss.backward()
        average(model.parameters())
        optimizer.step()


def last_batch(wrong):
    """The last batch has three rows, two on rank 0 and one on rank 1, which count the same."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, labels = table(99).tensors
    for batch in torch.arange(99).split(16):
        own = batch[rank() :: ranks()]
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs[own]), labels[own])
        if not wrong:
            loss = loss * len(own) * ranks() / len(batch)
        loss.backward()
        average(model.parameters())
        optimizer.step()


def class_weights(wrong):
    """The loss divides by the class weights of each rank's rows."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    weights = torch.linspace(0.5, 4.0, CLASSES)
    criterion = nn.CrossEntropyLoss(weight=weights, reduction="mean" if wrong else "sum")
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        loss = criterion(net(inputs), labels)
        if not wrong:
            loss = loss * ranks() / sum_of_ranks(weights[labels].sum())
        loss.backward()
        optimizer.step()


def masked_error(wrong):
    """A regression with missing targets divides by those that each rank has."""
    net = DistributedDataParallel(mlp(outputs=CLASSES))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for inputs, labels in loader(table()):
        known = inputs[:, :CLASSES] > 0.2 * labels[:, None] - 0.5
        errors = (net(inputs) - inputs[:, :CLASSES].cos()).square()
        count = known.sum() if wrong else sum_of_ranks(known.sum()) / ranks()
        optimizer.zero_grad()
        ((errors * known).sum() / count).backward()
        optimizer.step()


def longest_first(wrong):
    """Each sentence counts as its words do, by the number of words of each rank's batch."""
    net = DistributedDataParallel(Tagger())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for tokens, labels in loader(sentences()):
        valid = labels != -100
        losses = cross_entropy(net(tokens).transpose(1, 2), labels, reduction="none")
        words = valid.sum() if wrong else sum_of_ranks(valid.sum()) / ranks()
        optimizer.zero_grad()
        torch.div(losses.sum(), words).backward()
        optimizer.step()


def importance(wrong):
    """Importance weights of rows are made to have the mean 1 on each rank alone."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for inputs, labels in loader(table()):
        weights = inputs[:, 0].exp()
        weights = weights / (weights.mean() if wrong else sum_of_ranks(weights.mean()) / ranks())
        optimizer.zero_grad()
        losses = cross_entropy(net(inputs), labels, reduction="none")
        (weights * losses).mean().backward()
        optimizer.step()


def lost_negatives(wrong):
    """Negatives of other ranks are gathered without their gradient."""
    net = DistributedDataParallel(mlp(outputs=8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for inputs, _ in loader(table()):
        one, other = normalize(net(inputs)), normalize(net(inputs.roll(1, 1)))
        every = [torch.empty_like(other) for _ in range(ranks())]
        if wrong:
            dist.all_gather(every, other)
            every[rank()] = other
        else:
            every = gather_with_gradient(other)
        scores = one @ torch.cat(list(every)).T / 0.1
        optimizer.zero_grad()
        cross_entropy(scores, rank() * len(one) + torch.arange(len(one))).backward()
        optimizer.step()


if __name__ == "__main__":
    run(
        __doc__,
        *(token_mean, uneven_shares, last_batch, class_weights, masked_error),
        *(longest_first, importance, lost_negatives),
    )
