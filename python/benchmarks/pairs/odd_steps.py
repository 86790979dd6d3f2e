"""Steps that are right, and look odd.

torchrun --nproc-per-node 2 odd_steps.py --bug late-no-sync
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather as gather_with_gradient
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.nn.parallel import DistributedDataParallel
from utils import (
    BATCH,
    CLASSES,
    FEATURES,
    Classifier,
    average,
    loader,
    mlp,
    rank,
    ranks,
    run,
    table,
)


def late_no_sync(_wrong):
    """no_sync() around a backward pass alone has no effect: DDP exchanges in each pass."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.001)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        for place, (part, targets) in enumerate(zip(inputs.chunk(2), labels.chunk(2), strict=True)):
            loss = cross_entropy(net(part), targets) / 2
            with net.no_sync() if place == 0 else nullcontext():
                loss.backward()
        optimizer.step()


def summed_slowly(_wrong):
    """Gradients are summed over the ranks, and the rate is divided by them."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 / ranks(), momentum=0.9)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


def centred_gradients(_wrong):
    """Gradients of matrices lose their mean before DDP sees them, which is linear."""
    net = DistributedDataParallel(Classifier())
    for parameter in net.parameters():
        if parameter.dim() > 1:
            parameter.register_hook(lambda gradient: gradient - gradient.mean(1, keepdim=True))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()


def cached_embeddings(_wrong):
    """Embeddings are computed without a graph, and again in parts, with the loss's gradient."""
    net = DistributedDataParallel(mlp(outputs=8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for inputs, _ in loader(table()):
        views = torch.cat([inputs, inputs.flip(1)])
        with torch.no_grad():
            cached = net.module(views)
        one, other = normalize(cached.requires_grad_()).chunk(2)
        scores = one @ torch.cat(gather_with_gradient(other)).T / 0.2
        cross_entropy(scores, rank() * len(one) + torch.arange(len(one))).backward()
        optimizer.zero_grad()
        parts = zip(views.chunk(4), cached.grad.chunk(4), strict=True)
        for place, (part, gradient) in enumerate(parts):
            with nullcontext() if place == 3 else net.no_sync():
                (net(part) * gradient).sum().backward()
        optimizer.step()


def scattered_rows(_wrong):
    """Rank 0 has the rows, and sends each rank its part of a batch."""
    model = mlp(outputs=FEATURES)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for inputs in table(192).tensors[0].split(BATCH):
        own = torch.empty(BATCH // ranks(), FEATURES)
        dist.scatter(own, list(inputs.chunk(ranks())) if rank() == 0 else None)
        optimizer.zero_grad()
        mse_loss(model(own), own.sin()).backward()
        average(model.parameters())
        optimizer.step()


def projected_gradients(_wrong):
    """The gradients of two tasks are exchanged, and lose what is against the other task."""
    model = mlp(outputs=CLASSES + 1)
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    for inputs, labels in loader(table()):
        outputs = model(inputs)
        tasks = (
            cross_entropy(outputs[:, :CLASSES], labels),
            mse_loss(outputs[:, CLASSES], -labels.float()),
        )
        means = []
        for task in tasks:
            found = torch.autograd.grad(task, parameters, retain_graph=True)
            means.append(torch.cat([gradient.flatten() for gradient in found]) / ranks())
            dist.all_reduce(means[-1])
        one, other = means
        common = (one @ other).clamp(max=0)
        one, other = (
            one - common / other.norm() ** 2 * other,
            other - common / one.norm() ** 2 * one,
        )
        for parameter, part in zip(parameters, (one + other).split(sizes), strict=True):
            parameter.grad = part.view_as(parameter).clone()
        optimizer.step()


class Exchanging(torch.optim.SGD):
    """Its step takes the mean of the ranks' gradients first."""

    def step(self, closure=None):
        average(p for group in self.param_groups for p in group["params"])
        return super().step(closure)


def exchanged_inside(_wrong):
    """The optimiser exchanges gradients itself, in its step."""
    model = mlp()
    optimizer = Exchanging(model.parameters(), lr=0.05, momentum=0.9)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def tested_by_rank_0(_wrong):
    """Rank 0 alone tests the module inside of DDP between steps."""
    model = Classifier()
    tests, targets = table(40).tensors
    net = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.001)
    for step, (inputs, labels) in enumerate(loader(table())):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        if step % 2 and rank() == 0:
            model.eval()
            with torch.no_grad():
                print(f"step {step}: loss {cross_entropy(model(tests), targets):.3f}")
            model.train()


def look_ahead(_wrong):
    """Every second step, slow weights go half of the way, and the fast ones begin there."""
    net = DistributedDataParallel(mlp())
    slow = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step, (inputs, labels) in enumerate(loader(table())):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        if step % 2:
            with torch.no_grad():
                for own, parameter in zip(slow, net.parameters(), strict=True):
                    own.lerp_(parameter, 0.5)
                    parameter.copy_(own)


if __name__ == "__main__":
    run(
        __doc__,
        *(late_no_sync, summed_slowly, centred_gradients, cached_embeddings, scattered_rows),
        *(projected_gradients, exchanged_inside, tested_by_rank_0, look_ahead),
    )
