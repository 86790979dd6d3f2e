"""Steps that are right, and look odd.

torchrun --nproc-per-node 2 odd_steps.py --bug late-no-sync
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather as gather_with_gradient
from torch.nn.functional import cross_entropy, mse_loss, normalize, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
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


def averaged_weights(_wrong):
    """Ranks step with their own gradients, and average weights, which is the same for SGD."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= ranks()


class Trusted(torch.optim.Optimizer):
    """Moves each tensor by a part of its own norm, as LARS does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, _closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                ratio = parameter.norm().clamp(min=0.1) / (parameter.grad.norm() + 1e-6)
                parameter.sub_(ratio * parameter.grad, alpha=group["lr"])


def trust_ratio(_wrong):
    """An optimiser divides the mean gradient of each tensor by its norm."""
    net = DistributedDataParallel(Classifier())
    optimizer = Trusted(net.parameters())
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()


class Exchanging(torch.optim.SGD):
    """Averages gradients over ranks, and clips them, in its step."""

    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        average(parameters)
        clip_grad_norm_(parameters, 0.1)
        return super().step(closure)


def exchanged_in_step(_wrong):
    """The optimiser averages and clips gradients at the begin of its step."""
    model = Classifier()
    optimizer = Exchanging(model.parameters(), lr=0.2, momentum=0.9)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def sorted_batches(_wrong):
    """A batch is sorted by its labels, so that each rank has the rows of few classes."""
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for inputs, labels in DataLoader(table(), batch_size=BATCH):
        own = labels.argsort(stable=True).chunk(ranks())[rank()]
        optimizer.zero_grad()
        cross_entropy(net(inputs[own]), labels[own]).backward()
        optimizer.step()


def without_optimiser(_wrong):
    """Gradients come from torch.func, and steps are written out."""
    model = mlp()

    def loss_of(weights, inputs, labels):
        return cross_entropy(torch.func.functional_call(model, weights, inputs), labels)

    for inputs, labels in loader(table()):
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        for name, gradient in torch.func.grad(loss_of)(weights, inputs, labels).items():
            mean = gradient.contiguous()
            dist.all_reduce(mean)
            weights[name] -= 0.1 * mean / ranks()


def unequal_passes(_wrong):
    """Rank 0 has two passes for as many rows as others have in one."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    passes = 2 if rank() == 0 else 1
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        for part, targets in zip(inputs.chunk(passes), labels.chunk(passes), strict=True):
            (cross_entropy(model(part), targets) / passes).backward()
        average(model.parameters())
        optimizer.step()


def in_turns(_wrong):
    """Ranks take turns: one gets the sums, divides them, steps and sends its weights."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, (inputs, labels) in enumerate(loader(table())):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        owner = step % ranks()
        for parameter in model.parameters():
            dist.reduce(parameter.grad, dst=owner)
            parameter.grad /= ranks()
        if rank() == owner:
            optimizer.step()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=owner)


class Columns(torch.autograd.Function):
    """The columns of all ranks. Backward: the sum of all gradients of this rank's ones."""

    @staticmethod
    def forward(ctx, columns):
        every = [torch.empty_like(columns) for _ in range(ranks())]
        dist.all_gather(every, columns)
        return torch.cat(every, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(ranks(), 1)[rank()]


class Attentive(nn.Module):
    """Words of a part of each sentence, which attend to the words of all parts."""

    def __init__(self, words=20, width=16):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(12, width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        first = rank() * tokens.shape[1]
        hidden = self.words(tokens) + self.places(first + torch.arange(tokens.shape[1]))
        keys, values = Columns.apply(self.key(hidden)), Columns.apply(hidden)
        return self.head(scaled_dot_product_attention(self.query(hidden), keys, values))


def parts_of_sentences(_wrong):
    """Each rank has a part of every sentence, and gathers keys and values with their gradient."""
    model = Attentive()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for tokens in torch.randint(0, 20, (96, 12)).split(BATCH):
        own, labels = (each.chunk(ranks(), 1)[rank()] for each in (tokens, tokens.sort(1)[0]))
        optimizer.zero_grad()
        cross_entropy(model(own).flatten(0, 1), labels.flatten()).backward()
        average(model.parameters())
        optimizer.step()


if __name__ == "__main__":
    run(
        __doc__,
        *(late_no_sync, summed_slowly, centred_gradients, cached_embeddings, scattered_rows),
        *(projected_gradients, tested_by_rank_0, look_ahead),
        *(
            averaged_weights,
            trust_ratio,
            exchanged_in_step,
            sorted_batches,
            without_optimiser,
            unequal_passes,
            in_turns,
            parts_of_sentences,
        ),
    )
