"""Optimisers and schedules that depend on the number of ranks.

torchrun --nproc-per-node 2 optimiser_schedule.py --bug learning-rate [--fixed]
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau
from utils import (
    BATCH,
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


def learning_rate(wrong):
    """The rate is multiplied by the number of ranks although the global batch is fixed."""
    net = DistributedDataParallel(Classifier())
    rate = 0.05 * (ranks() if wrong else 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()


def clip_first(wrong):
    """Each rank clips its own gradient, before the exchange."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        if wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        average(model.parameters())
        if not wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def second_optimiser(wrong):
    """A GAN whose discriminator is not exchanged."""
    noise, real = table().tensors[0], 1 + table().tensors[0]
    generator, judge = mlp(outputs=FEATURES), nn.Linear(FEATURES, 1)
    of_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
    for batch in torch.arange(96).split(16):
        own = batch[rank() :: ranks()]
        of_judge.zero_grad()
        made = generator(noise[own]).detach()
        (judge(made) - judge(real[own])).mean().backward()
        if not wrong:
            average(judge.parameters())
        of_judge.step()
        of_generator.zero_grad()
        (-judge(generator(noise[own])).mean()).backward()
        average(generator.parameters())
        of_generator.step()


def schedule_of_ranks(wrong):
    """The schedule advances once for each rank."""
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        for _ in range(ranks() if wrong else 1):
            schedule.step()


def rate_of_rank(wrong):
    """Rank 0 alone reads the rate of the command line."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=1e-3)
    if rank() == 0 or not wrong:
        for group in optimizer.param_groups:
            group["lr"] = 0.02
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()


def plateau(wrong):
    """The schedule follows the loss of each rank."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.0)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        loss = cross_entropy(net(inputs), labels)
        loss.backward()
        optimizer.step()
        value = loss.detach()
        if not wrong:
            dist.all_reduce(value)
            value /= ranks()
        schedule.step(value)


def decay_of_ranks(wrong):
    """The weight decay is multiplied by the number of ranks."""
    net = DistributedDataParallel(mlp())
    decay = 0.2 * (ranks() if wrong else 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=decay)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()


def moments_of_rank_0(wrong):
    """Rank 0 alone restores the moments of its optimiser."""
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    state = {
        number: {"momentum_buffer": torch.full_like(parameter, 0.1)}
        for number, parameter in enumerate(net.parameters())
    }
    if rank() == 0 or not wrong:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()


def noise_of_rank(wrong):
    """Noise is added to the mean, on each rank its own."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    noise = torch.Generator().manual_seed(40 + (rank() if wrong else 0))
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        for parameter in net.parameters():
            parameter.grad += 0.001 * torch.randn(parameter.shape, generator=noise)
        optimizer.step()


def head_forgotten(wrong):
    """The optimiser of rank 1 does not have the head."""
    net = DistributedDataParallel(Classifier())
    model = net.module
    parts = [model.body, model.norm] if wrong and rank() else [model.body, model.norm, model.head]
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.05)
    for inputs, labels in loader(table()):
        net.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()


def values_clipped_first(wrong):
    """Each rank limits the values of its own gradient, before the exchange."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        if wrong:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        average(model.parameters())
        if not wrong:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()


def prefixed_names(wrong):
    """The head's rate is found by its name, which is another one inside of DDP."""
    model = Classifier()
    net = DistributedDataParallel(model) if ranks() > 1 else model
    groups = {False: [], True: []}
    for name, parameter in (net if wrong else model).named_parameters():
        groups[name.startswith("head.")].append(parameter)
    optimizer = torch.optim.SGD([{"params": groups[False]}], lr=0.02)
    optimizer.add_param_group({"params": groups[True], "lr": 0.2})
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()


def clipped_sum(wrong):
    """The sum over ranks is clipped before it is divided by them."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 1 if wrong else ranks()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for parameter in model.parameters():
            parameter.grad /= ranks() if wrong else 1
        optimizer.step()


RATES = (0.1, 0.5, 2.0, 8.0)


def loss_after(model, rate, inputs, labels):
    """Return the loss that a step of a rate would lead to."""
    moved = {name: each - rate * each.grad for name, each in model.named_parameters()}
    with torch.no_grad():
        return cross_entropy(torch.func.functional_call(model, moved, inputs), labels)


def searched_rate(wrong):
    """A rank takes the rate after which the loss of its own rows is the least."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=RATES[0])
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        losses = torch.stack([loss_after(net.module, rate, inputs, labels) for rate in RATES])
        if not wrong:
            dist.all_reduce(losses)
        optimizer.param_groups[0]["lr"] = RATES[int(losses.argmin())]
        optimizer.step()


def length_of_schedule(wrong):
    """The schedule is as long as all rows are batches of one rank."""
    dataset = table()
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    batches = len(dataset) // (BATCH // ranks() if wrong else BATCH)
    schedule = CosineAnnealingLR(optimizer, batches)
    for inputs, labels in loader(dataset):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        schedule.step()


def multiplier_of_rank(wrong):
    """The weight of a penalty rises and falls with the penalty of each rank's own rows."""
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    weight = torch.tensor(0.5)
    for inputs, labels in loader(table()):
        outputs = net(inputs)
        penalty = outputs.square().sum(1).mean()
        optimizer.zero_grad()
        (cross_entropy(outputs, labels) + weight * penalty).backward()
        optimizer.step()
        found = penalty.detach() if wrong else sum_of_ranks(penalty.detach()) / ranks()
        weight = (weight + 2 * (found - 0.1)).clamp(min=0)


if __name__ == "__main__":
    run(
        __doc__,
        *(learning_rate, clip_first, second_optimiser, schedule_of_ranks, rate_of_rank),
        *(plateau, decay_of_ranks, moments_of_rank_0),
        *(noise_of_rank, head_forgotten, values_clipped_first),
        *(prefixed_names, clipped_sum, searched_rate),
        *(length_of_schedule, multiplier_of_rank),
    )
