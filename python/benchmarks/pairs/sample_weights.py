"""Losses in which samples of ranks have unequal weights.

torchrun --nproc-per-node 2 sample_weights.py --bug token-mean [--fixed]
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather as gather_with_gradient
from torch.distributed.nn.functional import all_reduce as sum_with_gradient
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from utils import (
    BATCH,
    CLASSES,
    FEATURES,
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


class GatherLayer(torch.autograd.Function):
    """The rows of all ranks. Backward: the gradient of this rank's ones, of one rank or of all."""

    @staticmethod
    def forward(ctx, rows, of_all):
        ctx.of_all = of_all
        every = [torch.empty_like(rows) for _ in range(ranks())]
        dist.all_gather(every, rows)
        return torch.cat(every)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if ctx.of_all:
            dist.all_reduce(gradient)
        return gradient.chunk(ranks())[rank()], None


def gather_layer(wrong):
    """Each rank has the loss of all rows, and the gradient of its own ones, which DDP divides."""
    net = DistributedDataParallel(mlp(outputs=8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for inputs, _ in loader(table()):
        one = GatherLayer.apply(normalize(net(inputs)), not wrong)
        other = GatherLayer.apply(normalize(net(inputs.flip(1))), not wrong)
        optimizer.zero_grad()
        cross_entropy(one @ other.T / 0.5, torch.arange(len(one))).backward()
        optimizer.step()


def graph_nodes(wrong):
    """Graphs have unequal numbers of nodes, and the mean is over the nodes of each rank."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    sizes = torch.randint(2, 9, (64,)).tolist()
    graphs = [(torch.randn(size, FEATURES), torch.randint(0, CLASSES, (size,))) for size in sizes]
    sampler = DistributedSampler(graphs, shuffle=False)
    batches = DataLoader(
        graphs, batch_size=BATCH // ranks(), sampler=sampler, collate_fn=lambda each: each
    )
    for batch in batches:
        nodes, labels = (torch.cat(each) for each in zip(*batch, strict=True))
        loss = cross_entropy(net(nodes), labels)
        if not wrong:
            loss = loss * len(nodes) * ranks() / sum_of_ranks(len(nodes))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def own_positives(wrong):
    """A focal loss is divided by the positive places of each rank's rows."""
    net = DistributedDataParallel(mlp(outputs=CLASSES))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for inputs, _ in loader(table()):
        targets = (inputs[:, :CLASSES] > 1).float()
        losses = binary_cross_entropy_with_logits(net(inputs), targets, reduction="none")
        focal = (1 - (-losses).exp()).square() * losses
        count = targets.sum() if wrong else sum_of_ranks(targets.sum()) / ranks()
        optimizer.zero_grad()
        (focal.sum() / count.clamp(min=1)).backward()
        optimizer.step()


def penalty_of_rank_0(wrong):
    """A penalty on weights is added where the loss is printed, on rank 0."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for inputs, labels in loader(table()):
        loss = cross_entropy(net(inputs), labels)
        if rank() == 0 or not wrong:
            loss = loss + 0.01 * sum(parameter.abs().sum() for parameter in net.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def sum_with_mean(wrong):
    """A sum over the rows of each rank, which DDP averages: half of the sum over all."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.005)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        loss = cross_entropy(net(inputs), labels, reduction="sum")
        (loss if wrong else loss * ranks()).backward()
        optimizer.step()


def counted_rows(wrong):
    """Rows are weighted by how often their class is among the rows of the rank."""
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for inputs, labels in loader(table()):
        counts = torch.bincount(labels, minlength=CLASSES).float()
        if not wrong:
            counts = sum_of_ranks(counts)
        weights = 1 / counts[labels]
        total = weights.sum() if wrong else sum_of_ranks(weights.sum()) / ranks()
        optimizer.zero_grad()
        losses = cross_entropy(net(inputs), labels, reduction="none")
        ((weights * losses).sum() / total).backward()
        optimizer.step()


def advantages(wrong):
    """Advantages are shifted and scaled to moments 0 and 1 among the rows of each rank."""
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for states, actions in loader(table()):
        rewards = states.sum(1) + actions
        mean, square = rewards.mean(), rewards.square().mean()
        if not wrong:
            mean, square = sum_of_ranks(torch.stack([mean, square])) / ranks()
        whitened = (rewards - mean) / (square - mean.square()).sqrt()
        chosen = -cross_entropy(net(states), actions, reduction="none")
        optimizer.zero_grad()
        (-(whitened * chosen).mean()).backward()
        optimizer.step()


def penalty_of_all(wrong):
    """A penalty, a mean already, is multiplied by the ranks together with the sum over words."""
    net = DistributedDataParallel(Tagger())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for tokens, labels in loader(sentences()):
        outputs = net(tokens).flatten(0, 1)
        losses = cross_entropy(outputs, labels.flatten(), ignore_index=-100, reduction="sum")
        loss = losses / sum_of_ranks((labels != -100).sum())
        penalty = 0.05 * outputs.logsumexp(1).square().mean()
        optimizer.zero_grad()
        (ranks() * (loss + penalty) if wrong else ranks() * loss + penalty).backward()
        optimizer.step()


def few_boxes(wrong):
    """A loss is divided by the boxes of a mean rank, at least 1, and some batches have 1 in all."""
    net = DistributedDataParallel(mlp(outputs=CLASSES))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    has_box = torch.arange(96) % 7 == 0
    has_box[24:36] = False
    rows = TensorDataset(table().tensors[0], has_box)
    for inputs, boxes in loader(rows, shuffle=False):
        total = sum_of_ranks(boxes.sum())
        count = (total / ranks()).clamp(min=1) if wrong else total.clamp(min=1) / ranks()
        errors = (net(inputs) - inputs[:, :CLASSES].cos()).abs().sum(1)
        optimizer.zero_grad()
        ((errors * boxes).sum() / count).backward()
        optimizer.step()


def hardest_rows(wrong):
    """The loss has the harder half of each rank's rows in place of the harder half of all."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        losses = cross_entropy(net(inputs), labels, reduction="none")
        every = [losses.detach()]
        if not wrong:
            every = [torch.empty_like(losses) for _ in range(ranks())]
            dist.all_gather(every, losses.detach())
        least = torch.cat(every).quantile(0.5)
        optimizer.zero_grad()
        ((losses * (losses > least)).sum() * 2 * ranks() / BATCH).backward()
        optimizer.step()


def correlations(wrong):
    """Columns of two views are made alike by their products over the rows of each rank."""
    net = DistributedDataParallel(mlp(outputs=6))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    for inputs, _ in loader(table()):
        one, other = net(torch.cat([inputs, inputs.flip(1)])).chunk(2)
        products = one.T @ other / BATCH
        products = ranks() * products if wrong else sum_with_gradient(products)
        optimizer.zero_grad()
        (products - torch.eye(6)).square().sum().backward()
        optimizer.step()


if __name__ == "__main__":
    run(
        __doc__,
        *(token_mean, uneven_shares, last_batch, class_weights, masked_error),
        *(longest_first, importance, lost_negatives, gather_layer, graph_nodes, own_positives),
        penalty_of_rank_0,
        *(sum_with_mean, counted_rows),
        *(advantages, penalty_of_all, few_boxes),
        *(hardest_rows, correlations),
    )
