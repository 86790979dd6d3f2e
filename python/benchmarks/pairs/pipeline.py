"""Stages on two ranks, with micro-batches.

torchrun --nproc-per-node 2 pipeline.py --bug not-divided [--fixed]
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from utils import BATCH, CLASSES, FEATURES, rank, ranks, run, table

WIDTH, MICRO = 16, 4


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def first(self, inputs):
        return torch.relu(self.body(torch.relu(self.embed(inputs))))

    def last(self, hidden):
        return self.head(self.norm(hidden))


class Pipeline:
    """One stage on each rank: all forward passes, then all backward passes."""

    def __init__(self):
        self.network = Network()
        if ranks() > 1:
            for name in ("norm", "head") if rank() == 0 else ("embed", "body"):
                setattr(self.network, name, None)

    def parameters(self):
        return self.network.parameters()

    def step(self, inputs, labels, *, divisor=MICRO, order=None, returned=MICRO, sent=None):
        """Add the gradients of a batch.

        order: of the micro-batches' labels. returned: micro-batches whose gradient the first stage
        waits for. sent: what becomes of a gradient before it is sent.
        """
        parts, targets = inputs.chunk(MICRO), labels.chunk(MICRO)
        if order is not None:
            targets = [targets[number] for number in order]
        if ranks() == 1:
            for part, target in zip(inputs.chunk(MICRO), labels.chunk(MICRO), strict=True):
                outputs = self.network.last(self.network.first(part))
                (cross_entropy(outputs, target) / MICRO).backward()
        elif rank() == 0:
            outputs = [self.network.first(part) for part in parts]
            for output in outputs:
                dist.send(output.detach(), 1)
            for output in outputs[:returned]:
                gradient = torch.empty_like(output)
                dist.recv(gradient, 1)
                output.backward(gradient)
        else:
            hidden = []
            for part in parts:
                received = torch.empty(len(part), WIDTH)
                dist.recv(received, 0)
                hidden.append(received.requires_grad_())
            losses = [
                cross_entropy(self.network.last(each), target) / divisor
                for each, target in zip(hidden, targets, strict=True)
            ]
            for number, (loss, received) in enumerate(zip(losses, hidden, strict=True)):
                loss.backward()
                if number < returned:
                    gradient = received.grad if sent is None else sent(received.grad)
                    dist.send(gradient.contiguous(), 0)


def trained(pipeline, **options):
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.05, momentum=0.9)
    for inputs, labels in DataLoader(table(), batch_size=BATCH):
        optimizer.zero_grad()
        pipeline.step(inputs, labels, **options)
        optimizer.step()


def not_divided(wrong):
    """Losses of micro-batches are not divided by their number."""
    trained(Pipeline(), divisor=1 if wrong else MICRO)


def other_labels(wrong):
    """The last stage takes the labels in another order than the micro-batches come."""
    trained(Pipeline(), order=[1, 0, 3, 2] if wrong else None)


def last_dropped(wrong):
    """The gradient of the last micro-batch does not return to the first stage."""
    trained(Pipeline(), returned=MICRO - 1 if wrong else MICRO)


def not_emptied(wrong):
    """The first stage does not empty its gradients between steps."""
    pipeline = Pipeline()
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.05)
    for inputs, labels in DataLoader(table(), batch_size=BATCH):
        pipeline.step(inputs, labels)
        optimizer.step()
        if not wrong or ranks() == 1 or rank() == 1:
            optimizer.zero_grad()


def other_rate(wrong):
    """The stages have different learning rates."""
    pipeline = Pipeline()
    rate = 0.1 if wrong and rank() == 1 else 0.05
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=rate)
    for inputs, labels in DataLoader(table(), batch_size=BATCH):
        optimizer.zero_grad()
        pipeline.step(inputs, labels)
        optimizer.step()


def scaled_return(wrong):
    """The gradient that returns to the first stage is divided by the number of stages."""
    trained(Pipeline(), sent=(lambda gradient: gradient / ranks()) if wrong else None)


if __name__ == "__main__":
    run(__doc__, not_divided, other_labels, last_dropped, not_emptied, other_rate, scaled_return)
