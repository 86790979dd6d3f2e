"""Weights or optimisers that ranks have in shards.

torchrun --nproc-per-node 2 sharding.py --bug own-norm [--fixed]
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from utils import Classifier, average, loader, mlp, rank, ranks, run, table


def own_norm(wrong):
    """Each rank clips its shards by their norm alone."""
    model = Classifier()
    for part in (model.body, model.head, model):
        fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        if wrong:
            shards = [parameter.grad.to_local() for parameter in model.parameters()]
            norm = torch.stack([shard.norm() for shard in shards]).norm()
            for shard in shards:
                shard.mul_(min(1.0, 0.05 / norm))
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def owned(model):
    """Return the parameters that this rank steps."""
    return [p for number, p in enumerate(model.parameters()) if number % ranks() == rank()]


def lost_broadcast(wrong):
    """Each rank steps some parameters; the last one is not sent to the others."""
    model = mlp()
    optimizer = torch.optim.Adam(owned(model), lr=0.01)
    sent = list(model.parameters())[: -1 if wrong else None]
    for inputs, labels in loader(table()):
        model.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        average(model.parameters())
        optimizer.step()
        for number, parameter in enumerate(sent):
            dist.broadcast(parameter.data, src=number % ranks())


def other_owner(wrong):
    """A rank that does not step some parameters sends them, so they never change."""
    model = mlp()
    optimizer = torch.optim.Adam(owned(model), lr=0.01)
    for inputs, labels in loader(table()):
        model.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        average(model.parameters())
        optimizer.step()
        for number, parameter in enumerate(model.parameters()):
            dist.broadcast(parameter.data, src=(number + (1 if wrong else 0)) % ranks())


def sum_of_shards(wrong):
    """A reduce-scatter of flat gradients sums, and nobody divides."""
    model = mlp(width=15)  # 199 numbers
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters] + [torch.zeros(1)])
    shard = nn.Parameter(flat.chunk(ranks())[rank()].clone())
    optimizer = torch.optim.AdamW([shard], lr=0.01)
    for inputs, labels in loader(table()):
        model.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        gradient = torch.cat([p.grad.flatten() for p in parameters] + [torch.zeros(1)])
        shard.grad = torch.zeros_like(shard)
        dist.reduce_scatter_tensor(shard.grad, gradient)
        if not wrong:
            shard.grad /= ranks()
        optimizer.step()
        dist.all_gather_into_tensor(flat, shard.data)
        for parameter, part in zip(parameters, flat[:-1].split(sizes), strict=True):
            parameter.data.copy_(part.view_as(parameter))


def stale_gather(wrong):
    """Weights are gathered every second step, so that ranks train with old parts of others."""
    model = mlp()
    optimizer = torch.optim.SGD(owned(model), lr=0.05)
    for step, (inputs, labels) in enumerate(loader(table())):
        model.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        average(model.parameters())
        optimizer.step()
        if step % 2 or not wrong:
            for number, parameter in enumerate(model.parameters()):
                dist.broadcast(parameter.data, src=number % ranks())


def summed_again(wrong):
    """Gradients of FSDP, which are means, are divided by the number of ranks once more."""
    model = Classifier()
    for part in (model.body, model.head, model):
        fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            parameter.grad /= ranks() if wrong else 1
        optimizer.step()


def early_optimiser(wrong):
    """The optimiser is made before the model is sharded, and steps tensors that nothing uses."""
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for part in (model.body, model.head, model):
        fully_shard(part)
    if not wrong:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for inputs, labels in loader(table()):
        model.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()


class DividedSigns(torch.optim.Optimizer):
    """Each rank computes the updates of some matrices, and all get them (as Muon does)."""

    def __init__(self, parameters, lr, leaves_out):
        super().__init__(list(parameters), {"lr": lr})
        self.leaves_out = leaves_out

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                is_last = self.leaves_out and number == len(group["params"]) - 1
                update = torch.zeros_like(parameter)
                if number % ranks() == rank():
                    update = parameter.grad / (parameter.grad.norm() + 1e-6)
                if not is_last:
                    dist.all_reduce(update)
                parameter.sub_(update, alpha=group["lr"])


def dropped_matrix(wrong):
    """Updates of the matrices past a multiple of the ranks are not sent."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)), mlp())
    net = DistributedDataParallel(model)
    matrices = [p for p in model.parameters() if p.dim() > 1][:3]
    others = [p for p in model.parameters() if all(p is not each for each in matrices)]
    optimizers = DividedSigns(matrices, 0.05, wrong), torch.optim.Adam(others, lr=0.01)
    for inputs, labels in loader(table()):
        net.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        for each in optimizers:
            each.step()


def divided_again(wrong):
    """A reduce-scatter of flat gradients that are divided already divides once more."""
    model = mlp(width=15)
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters] + [torch.zeros(1)])
    shard = nn.Parameter(flat.chunk(ranks())[rank()].clone())
    optimizer = torch.optim.Adam([shard], lr=0.01)
    for inputs, labels in loader(table()):
        model.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        gradients = [parameter.grad.flatten() / ranks() for parameter in parameters]
        shard.grad = torch.zeros_like(shard)
        dist.reduce_scatter_tensor(shard.grad, torch.cat([*gradients, torch.zeros(1)]))
        if wrong:
            shard.grad /= ranks()
        optimizer.step()
        dist.all_gather_into_tensor(flat, shard.data)
        for parameter, part in zip(parameters, flat[:-1].split(sizes), strict=True):
            parameter.data.copy_(part.view_as(parameter))


def own_gradient(wrong):
    """The owner of the last parameter steps with its own gradient of it."""
    model = mlp()
    optimizer = torch.optim.AdamW(owned(model), lr=0.01)
    for inputs, labels in loader(table()):
        model.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        average(list(model.parameters())[: -1 if wrong else None])
        optimizer.step()
        for number, parameter in enumerate(model.parameters()):
            dist.broadcast(parameter.data, src=number % ranks())


def sent_before(wrong):
    """Owners send their parameters before they step."""
    model = mlp()
    optimizer = torch.optim.SGD(owned(model), lr=0.05)
    for inputs, labels in loader(table()):
        model.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        average(model.parameters())
        if not wrong:
            optimizer.step()
        for number, parameter in enumerate(model.parameters()):
            dist.broadcast(parameter.data, src=number % ranks())
        if wrong:
            optimizer.step()


def decay_of_shard(wrong):
    """The weight decay of shards depends on the rank."""
    model = Classifier()
    for part in (model.body, model.head, model):
        fully_shard(part)
    decay = 0.1 * (1 + rank() if wrong else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=decay)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()


class Normed(torch.optim.Optimizer):
    """Moves each shard against its gradient, whose length does not matter."""

    def __init__(self, parameters, lr, of_shard):
        super().__init__(list(parameters), {"lr": lr})
        self.of_shard = of_shard

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad.to_local()
                square = gradient.square().sum()
                if not self.of_shard:
                    dist.all_reduce(square)
                parameter.to_local().sub_(gradient / (square.sqrt() + 1e-6), alpha=group["lr"])


def normed_shards(wrong):
    """The optimiser divides by the norm of each rank's shard in place of that of the matrix."""
    model = Classifier()
    for part in (model.body, model.head, model):
        fully_shard(part)
    optimizer = Normed(model.parameters(), 0.02, wrong)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def forgotten_root(wrong):
    """Layers are sharded, and the model around them, which has a norm of its own, is not."""
    model = Classifier()
    for part in (model.body, model.head) if wrong else (model.body, model.head, model):
        fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def exchange_of_root(wrong):
    """The exchange is off in the first of two passes, and on again for the root alone."""
    model = Classifier()
    for part in (model.body, model.head, model):
        fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        for place, (part, targets) in enumerate(zip(inputs.chunk(2), labels.chunk(2), strict=True)):
            if ranks() > 1:
                model.set_requires_gradient_sync(place == 1, recurse=place == 0 or not wrong)
            (cross_entropy(model(part), targets) / 2).backward()
        optimizer.step()


def last_number(wrong):
    """Ranks step parts of 99 numbers each, out of 199, so that nobody steps the last one."""
    model = mlp(width=15)
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    size = (len(flat) + (0 if wrong else ranks() - 1)) // ranks()
    own = slice(rank() * size, (rank() + 1) * size)
    shard = nn.Parameter(flat[own].clone())
    optimizer = torch.optim.SGD([shard], lr=0.05, momentum=0.9)
    for inputs, labels in loader(table()):
        model.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        average(parameters)
        shard.grad = torch.cat([parameter.grad.flatten() for parameter in parameters])[own]
        optimizer.step()
        flat[own] = shard.detach()
        for each in range(ranks()):
            dist.broadcast(flat[each * size : (each + 1) * size], src=each)
        parts = flat.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data.copy_(part.view_as(parameter))


def divide_factor(wrong):
    """FSDP adds gradients up without dividing them, although each rank's loss is a mean."""
    model = Classifier()
    for part in (model.body, model.head, model):
        fully_shard(part)
        if wrong:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    run(
        __doc__,
        *(own_norm, lost_broadcast, other_owner, sum_of_shards, stale_gather, summed_again),
        *(early_optimiser, dropped_matrix),
        *(divided_again, own_gradient, sent_before, decay_of_shard),
        *(normed_shards, forgotten_root, exchange_of_root),
        *(last_number, divide_factor),
    )
