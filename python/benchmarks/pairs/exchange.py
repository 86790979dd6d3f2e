"""Gradients that are exchanged wrongly.

torchrun --nproc-per-node 2 exchange.py --bug total [--fixed]
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, dropout, mse_loss
from torch.nn.parallel import DistributedDataParallel
from utils import FEATURES, Classifier, average, loader, mlp, rank, ranks, run, table


def no_exchange(wrong):
    """The loop calls the module inside DDP, so that nothing is exchanged without a message."""
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        outputs = net.module(inputs) if wrong else net(inputs)
        cross_entropy(outputs, labels).backward()
        optimizer.step()


def total(wrong):
    """Sums in place of means."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            if not wrong:
                parameter.grad /= ranks()
        optimizer.step()


def total_with_dropout(wrong):
    """Sums in place of means, where random numbers hide them from a comparison."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(dropout(model(inputs), 0.4), labels).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 1 if wrong else ranks()
        optimizer.step()


def divided_twice(wrong):
    """DDP averages, and the script divides again."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        if wrong:
            for parameter in net.parameters():
                parameter.grad /= ranks()
        optimizer.step()


class AutoEncoder(nn.Module):
    """The weight of the decoder is that of the encoder."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(FEATURES, FEATURES, bias=False)
        self.decoder = nn.Linear(FEATURES, FEATURES, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, inputs):
        return self.decoder(torch.tanh(self.encoder(inputs)))


def tied_twice(wrong):
    """A tied weight is reduced under both of its names."""
    model = nn.Sequential(AutoEncoder(), nn.Linear(FEATURES, FEATURES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, _ in loader(table()):
        optimizer.zero_grad()
        mse_loss(model(inputs), inputs).backward()
        for _, parameter in model.named_parameters(remove_duplicate=not wrong):
            dist.all_reduce(parameter.grad)
        for parameter in model.parameters():
            parameter.grad /= ranks()
        optimizer.step()


def late_drift(wrong):
    """Rank 1 stops to copy the exchanged gradients back."""
    model = mlp()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    for step, (inputs, labels) in enumerate(loader(table())):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        bucket = torch.cat([parameter.grad.flatten() for parameter in parameters])
        dist.all_reduce(bucket)
        bucket /= ranks()
        if not (wrong and rank() == 1 and step >= 2):
            parts = bucket.split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad.copy_(part.view_as(parameter))
        optimizer.step()


def new_head(wrong):
    """The list of parameters to exchange is older than the head."""
    model = Classifier()
    exchanged = list(model.parameters())
    model.head = nn.Linear(16, 4)
    if not wrong:
        exchanged = list(model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        average(parameter for parameter in exchanged if parameter.grad is not None)
        optimizer.step()


def unused_branch(wrong):
    """The list of parameters to exchange has those that a first pass, without a branch, reaches."""
    parts = {"body": mlp(outputs=8), "rare": nn.Linear(8, 4), "head": nn.Linear(8, 4)}
    model = nn.ModuleDict(parts)

    def forward(inputs, *, has_rare):
        hidden = torch.relu(model["body"](inputs))
        outputs = model["head"](hidden)
        return outputs + model["rare"](hidden) if has_rare else outputs

    forward(torch.ones(2, FEATURES), has_rare=not wrong).sum().backward()
    exchanged = [parameter for parameter in model.parameters() if parameter.grad is not None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(forward(inputs, has_rare=True), labels).backward()
        average(exchanged)
        optimizer.step()


if __name__ == "__main__":
    run(
        __doc__,
        *(no_exchange, total, total_with_dropout, divided_twice, tied_twice, late_drift, new_head),
        unused_branch,
    )
