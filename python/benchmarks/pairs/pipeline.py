"""Stages on two ranks, with micro-batches.

torchrun --nproc-per-node 2 pipeline.py --bug not-divided [--fixed]
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, dropout, linear, mse_loss
from torch.utils.checkpoint import checkpoint
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


class Coder(nn.Module):
    """Its last layer has the weight of the first one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)

    def encode(self, inputs):
        return torch.tanh(self.first(inputs))

    def loss(self, hidden, inputs):
        return mse_loss(linear(self.middle(hidden), self.first.weight.T), inputs)


def tied_weight(wrong):
    """Both stages have a copy of a tied weight, and its gradients are not added up."""
    net = Coder()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for inputs, _ in DataLoader(table(), batch_size=BATCH):
        optimizer.zero_grad()
        if ranks() == 1:
            net.loss(net.encode(inputs), inputs).backward()
        elif rank() == 0:
            hidden = net.encode(inputs)
            dist.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            hidden = torch.empty(len(inputs), WIDTH)
            dist.recv(hidden, 0)
            net.loss(hidden.requires_grad_(), inputs).backward()
            dist.send(hidden.grad, 0)
        if ranks() > 1:
            for parameter in net.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if not wrong or parameter is not net.first.weight:
                    dist.all_reduce(parameter.grad)
        optimizer.step()


def own_clip(wrong):
    """Each stage clips its gradients by their norm alone."""
    pipeline = Pipeline()
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    for inputs, labels in DataLoader(table(), batch_size=BATCH):
        optimizer.zero_grad()
        pipeline.step(inputs, labels)
        gradients = [parameter.grad for parameter in pipeline.parameters()]
        square = sum(gradient.square().sum() for gradient in gradients)
        if not wrong:
            dist.all_reduce(square)
        for gradient in gradients:
            gradient.mul_(min(1.0, 0.05 / float(square.sqrt())))
        optimizer.step()


def unequal_parts(wrong):
    """Micro-batches of 6, 6 and 4 rows have the same weight."""
    net = Network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for inputs, labels in DataLoader(table(), batch_size=BATCH):
        optimizer.zero_grad()
        for part, target in zip(inputs.split(6), labels.split(6), strict=True):
            weight = 1 / 3 if wrong and ranks() > 1 else len(part) / len(inputs)
            if ranks() == 1:
                (weight * cross_entropy(net.last(net.first(part)), target)).backward()
            elif rank() == 0:
                hidden = net.first(part)
                gradient = torch.empty_like(hidden)
                dist.send(hidden.detach(), 1)
                dist.recv(gradient, 1)
                hidden.backward(gradient)
            else:
                hidden = torch.empty(len(part), WIDTH)
                dist.recv(hidden, 0)
                (weight * cross_entropy(net.last(hidden.requires_grad_()), target)).backward()
                dist.send(hidden.grad, 0)
        optimizer.step()


def every_second(wrong):
    """The first stage steps after every second batch, the last one after each."""
    pipeline = Pipeline()
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.05)
    for number, (inputs, labels) in enumerate(DataLoader(table(160), batch_size=BATCH)):
        pipeline.step(inputs, labels)
        if number % 2 or not wrong or ranks() == 1 or rank() == 1:
            optimizer.step()
            optimizer.zero_grad()


def repeated_gradient(wrong):
    """The last stage sends one gradient twice, and that of the last micro-batch never."""
    pipeline = Pipeline()
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.05)
    kept = []

    def repeated(gradient):
        kept.append(gradient.clone())
        return kept[-2] if len(kept) % MICRO == 0 else gradient

    for inputs, labels in DataLoader(table(), batch_size=BATCH):
        optimizer.zero_grad()
        pipeline.step(inputs, labels, sent=repeated if wrong else None)
        optimizer.step()


def sent_ahead(wrong):
    """The first stage computes and sends its outputs of the next batch before it steps."""
    net = Network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches, sent = list(DataLoader(table(), batch_size=BATCH)), []

    def send(number):
        if number < len(batches) and len(sent) == number:
            with torch.no_grad():
                sent.append(dist.isend(net.first(batches[number][0]), 1))

    for number, (inputs, labels) in enumerate(batches):
        optimizer.zero_grad()
        if ranks() == 1:
            cross_entropy(net.last(net.first(inputs)), labels).backward()
        elif rank() == 0:
            send(number)
            if wrong:
                send(number + 1)
            gradient = torch.empty(len(inputs), WIDTH)
            dist.recv(gradient, 1)
            net.first(inputs).backward(gradient)
        else:
            hidden = torch.empty(len(inputs), WIDTH)
            dist.recv(hidden, 0)
            cross_entropy(net.last(hidden.requires_grad_()), labels).backward()
            dist.send(hidden.grad, 0)
        optimizer.step()
    for work in sent:
        work.wait()


def passed(first, last, width=WIDTH):
    """Train with a stage on each rank; last returns a loss."""
    net = Network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for inputs, labels in DataLoader(table(), batch_size=BATCH):
        optimizer.zero_grad()
        if ranks() == 1:
            last(net, first(net, inputs), labels).backward()
        elif rank() == 0:
            hidden = first(net, inputs)
            gradient = torch.empty_like(hidden)
            dist.send(hidden.detach(), 1)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            hidden = torch.empty(len(inputs), width)
            dist.recv(hidden, 0)
            last(net, hidden.requires_grad_(), labels).backward()
            dist.send(hidden.grad, 0)
        optimizer.step()


def other_masks(wrong):
    """The first stage computes again what its gradient needs, with another dropout than it sent."""

    def hidden(net, inputs):
        return dropout(net.first(inputs), 0.3)

    def first(net, inputs):
        if ranks() == 1:
            return hidden(net, inputs)
        return checkpoint(hidden, net, inputs, use_reentrant=False, preserve_rng_state=not wrong)

    passed(first, lambda net, hidden, labels: cross_entropy(net.last(hidden), labels))


def lost_shortcut(wrong):
    """A shortcut past the body is sent to the last stage, and its gradient does not return."""

    def first(net, inputs):
        early = torch.relu(net.embed(inputs))
        late = torch.relu(net.body(early))
        return torch.cat([early.detach() if wrong and ranks() > 1 else early, late], 1)

    def last(net, hidden, labels):
        early, late = hidden.chunk(2, 1)
        return cross_entropy(net.last(early + late), labels)

    passed(first, last, width=2 * WIDTH)


class Penalised(torch.autograd.Function):
    """Hidden numbers whose squares are a part of the loss, by their gradient."""

    @staticmethod
    def forward(ctx, hidden):
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        [hidden] = ctx.saved_tensors
        return gradient + 0.2 * hidden / len(hidden)


def lost_penalty(wrong):
    """The first stage leaves out its own part of the loss, a penalty of its outputs."""

    def first(net, inputs):
        hidden = net.first(inputs)
        return hidden if wrong and ranks() > 1 else Penalised.apply(hidden)

    passed(first, lambda net, hidden, labels: cross_entropy(net.last(hidden), labels))


def one_buffer(wrong):
    """The last stage receives all micro-batches into one tensor, and computes with the last one."""
    net = Network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    count = 1 if wrong else MICRO
    buffers = [torch.empty(BATCH // MICRO, WIDTH) for _ in range(count)] * (MICRO // count)
    for inputs, labels in DataLoader(table(), batch_size=BATCH):
        parts, targets = inputs.chunk(MICRO), labels.chunk(MICRO)
        optimizer.zero_grad()
        outputs = [net.first(part) for part in parts] if rank() == 0 else buffers
        if ranks() > 1:
            for output in outputs:
                dist.send(output.detach(), 1) if rank() == 0 else dist.recv(output, 0)
        for output, target in zip(outputs, targets, strict=True):
            gradient = torch.empty_like(output)
            if rank() == ranks() - 1:
                hidden = output.detach().requires_grad_()
                (cross_entropy(net.last(hidden), target) / MICRO).backward()
                gradient = hidden.grad
            if ranks() > 1:
                dist.recv(gradient, 1) if rank() == 0 else dist.send(gradient, 0)
            if rank() == 0:
                output.backward(gradient)
        optimizer.step()


if __name__ == "__main__":
    run(
        __doc__,
        *(not_divided, other_labels, last_dropped, not_emptied, other_rate, scaled_return),
        *(tied_weight, own_clip, unequal_parts, every_second),
        repeated_gradient,
        *(sent_ahead, other_masks, lost_shortcut),
        *(lost_penalty, one_buffer),
    )
