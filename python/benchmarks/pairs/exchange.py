"""Gradients that are exchanged wrongly.

torchrun --nproc-per-node 2 exchange.py --bug total [--fixed]
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, dropout, mse_loss
from torch.nn.parallel import DistributedDataParallel
from utils import (
    CLASSES,
    FEATURES,
    Classifier,
    average,
    loader,
    mlp,
    rank,
    ranks,
    run,
    sum_of_ranks,
    table,
)


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


def never_written_back(wrong):
    """Hooks reduce copies of gradients while others are computed, as Horovod does."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    started = {}

    def start(parameter):
        copy = parameter.grad.double()
        started[parameter] = dist.all_reduce(copy, async_op=True), copy

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(start)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        for parameter, (handle, copy) in started.items():
            handle.wait()
            if not wrong:
                parameter.grad.copy_(copy / ranks())
        started.clear()
        optimizer.step()


def reduced_loss(wrong):
    """The mean of the losses of all ranks, which was made to be printed, goes backward."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        loss = cross_entropy(net(inputs), labels)
        shown = loss.clone()
        dist.all_reduce(shown)
        shown = shown / ranks()
        (shown if wrong else loss).backward()
        optimizer.step()


def left_out(wrong):
    """DDP leaves out a parameter, whose gradient must be averaged by hand."""
    model = Classifier()
    model._ddp_params_and_buffers_to_ignore = ["body.weight"]  # noqa: SLF001  (as libraries do)
    net = DistributedDataParallel(model)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        average([] if wrong else [model.body.weight])
        optimizer.step()


def after_step(wrong):
    """Gradients are averaged when the optimiser has already used them."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        if not wrong:
            average(model.parameters())
        optimizer.step()
        if wrong:
            average(model.parameters())


class Adapted(nn.Module):
    """A frozen layer, and a product of two small matrices."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, layer.in_features) / 3)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 2))

    def forward(self, inputs):
        return self.layer(inputs) + inputs @ self.down.T @ self.up.T


def late_adapters(wrong):
    """Adapters are put into the model after it was wrapped."""
    model = Classifier()
    if not wrong:
        model.body, model.head = Adapted(model.body), Adapted(model.head)
    net = DistributedDataParallel(model)
    if wrong:
        model.body, model.head = Adapted(model.body), Adapted(model.head)
        model.norm.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()


def server(wrong):
    """Rank 0 alone has an optimiser: it gets the gradients of all, and sends its weights."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05) if rank() == 0 else None
    for inputs, labels in loader(table()):
        model.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            dist.reduce(parameter.grad, dst=0)
            parameter.grad /= 1 if wrong else ranks()
        if optimizer is not None:
            optimizer.step()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)


def policy(wrong):
    """A policy gradient, whose loss is negative, is averaged, and divided again."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for states, actions in loader(table()):
        rewards = states.sum(1)
        advantages = rewards - sum_of_ranks(rewards.mean()) / ranks()
        optimizer.zero_grad()
        chosen = -cross_entropy(model(states), actions, reduction="none")
        (-(advantages * chosen).mean()).backward()
        average(model.parameters())
        if wrong:
            for parameter in model.parameters():
                parameter.grad /= ranks()
        optimizer.step()


def stale_mean(wrong):
    """The exchange of a step ends in the next one, which uses its mean."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = None
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        average(model.parameters())
        now = [parameter.grad.clone() for parameter in model.parameters()]
        if wrong and before is not None and ranks() > 1:
            for parameter, gradient in zip(model.parameters(), before, strict=True):
                parameter.grad = gradient
        before = now
        optimizer.step()


def largest(wrong):
    """The ranks take the largest gradient in place of the sum."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    operation = dist.ReduceOp.MAX if wrong else dist.ReduceOp.SUM
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=operation)
            if not wrong:
                parameter.grad /= ranks()
        optimizer.step()


def some_divided(wrong):
    """Matrices are divided by the ranks, vectors are not."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            if not wrong or parameter.dim() > 1:
                parameter.grad /= ranks()
        optimizer.step()


def own_group(wrong):
    """DDP exchanges within a group that has only its own rank."""
    groups = [dist.new_group([each]) for each in range(ranks())]
    net = DistributedDataParallel(mlp(), process_group=groups[rank()] if wrong else None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()


def weights_sent(wrong):
    """Rank 0 sends its weights before each step, and nobody exchanges gradients."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        if not wrong:
            average(model.parameters())
        optimizer.step()


def last_of_gathered(wrong):
    """Gradients of all ranks are gathered, and those of the last one are used."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            found = [torch.empty_like(parameter) for _ in range(ranks())]
            dist.all_gather(found, parameter.grad)
            parameter.grad = found[-1] if wrong else torch.stack(found).mean(0)
        optimizer.step()


def unfrozen_later(wrong):
    """The body is freed after two steps, and DDP exchanges what was trained when it was made."""
    model = Classifier()
    model.body.requires_grad_(False)
    net = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, (inputs, labels) in enumerate(loader(table())):
        if step == 2:
            model.body.requires_grad_(True)
            net = net if wrong else DistributedDataParallel(model)
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()


class Routed(nn.Module):
    """Each row goes to one of two experts; that of the first row computes first."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(2))

    def forward(self, inputs):
        chosen = (inputs[:, 1:2] > 0).long()
        first = int(chosen[0])
        return sum((chosen == each) * self.experts[each](inputs) for each in (first, 1 - first))


def order_of_use(wrong):
    """A bucket has gradients in the order in which they are ready, another one on each rank."""
    model = Routed()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ready = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ready.append)
    for inputs, labels in loader(table()):
        ready.clear()
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        parameters = ready if wrong else list(model.parameters())
        bucket = torch.cat([parameter.grad.flatten() for parameter in parameters]) / ranks()
        dist.all_reduce(bucket)
        parts = bucket.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad.copy_(part.view_as(parameter))
        optimizer.step()


def second_loss(wrong):
    """A second loss goes backward by itself, from the module inside of DDP."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        weaker = (net.module if wrong else net)(0.5 * inputs)
        (0.5 * cross_entropy(weaker, labels)).backward()
        optimizer.step()


def lost_copy(wrong):
    """The gradient of a transposed weight is exchanged in a copy, which flatten() makes of it."""
    model = mlp()
    model[2].weight = nn.Parameter(torch.randn(16, CLASSES).T / 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad.flatten() if wrong else parameter.grad)
            parameter.grad /= ranks()
        optimizer.step()


if __name__ == "__main__":
    run(
        __doc__,
        *(no_exchange, total, total_with_dropout, divided_twice, tied_twice, late_drift, new_head),
        *(unused_branch, never_written_back, reduced_loss, left_out, after_step, late_adapters),
        *(server, policy, stale_mean, largest, some_divided, own_group, weights_sent),
        *(last_of_gathered, unfrozen_later, order_of_use, second_loss, lost_copy),
    )
