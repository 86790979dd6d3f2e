"""Ranks that train on the wrong rows.

torchrun --nproc-per-node 2 data.py --bug same-samples [--fixed]
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)
from utils import BATCH, FEATURES, Classifier, loader, rank, ranks, run, table


def trained(batches):
    """Train with DDP, one epoch after the other."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for epoch in batches:
        for inputs, labels in epoch:
            optimizer.zero_grad()
            cross_entropy(net(inputs), labels).backward()
            optimizer.step()


def same_samples(wrong):
    """No DistributedSampler."""
    dataset = table()
    sampler = None if wrong else DistributedSampler(dataset, shuffle=False)
    trained([DataLoader(dataset, batch_size=BATCH // ranks(), sampler=sampler)])


def seed_of_rank(wrong):
    """Each rank shuffles by a seed of its own, and takes its part of the order."""
    dataset = table(192)
    generator = torch.Generator().manual_seed(3 + (rank() if wrong else 0))
    order = torch.randperm(len(dataset), generator=generator)[rank() :: ranks()]
    trained([DataLoader(Subset(dataset, order.tolist()), batch_size=BATCH // ranks())])


def divided_twice(wrong):
    """A part of the data for each rank, of which a DistributedSampler takes a part again."""
    dataset = table()
    if wrong:
        part = Subset(dataset, range(rank(), len(dataset), ranks()))
        trained([loader(part, shuffle=False)])
    else:
        trained([loader(dataset, shuffle=False)])


def overlap(wrong):
    """The parts of the ranks overlap, as the begin of one is computed from another size."""
    dataset = table(160)
    size = len(dataset) // ranks()
    begin = rank() * (size // 2 if wrong else size)
    part = Subset(dataset, range(begin, begin + size))
    trained([DataLoader(part, batch_size=BATCH // ranks())])


def own_moments(wrong):
    """Rows are shifted by the running mean of those of each rank."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    count, total = torch.zeros(1), torch.zeros(FEATURES)
    inputs, labels = table().tensors
    for batch in torch.arange(len(inputs)).split(BATCH):
        own = batch[rank() :: ranks()]
        new = torch.cat([torch.full((1,), float(len(own))), inputs[own].sum(0)])
        if not wrong:
            dist.all_reduce(new)
        count, total = count + new[:1], total + new[1:]
        optimizer.zero_grad()
        cross_entropy(net(inputs[own] - total / count), labels[own]).backward()
        optimizer.step()


def one_batch_ahead(wrong):
    """Rank 1 leaves out its first batch, so that batches of a step are of different places."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    batches = iter(loader(table(160), shuffle=False))
    if wrong and rank() == 1:
        next(batches)
    for _ in range(9):
        inputs, labels = next(batches)
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()


def rank_of_node(wrong):
    """The sampler gets the rank within a group of one, so that all ranks have the first part."""
    dataset = table(192)
    number = 0 if wrong else rank()
    sampler = DistributedSampler(dataset, num_replicas=ranks(), rank=number, drop_last=True)
    trained([DataLoader(dataset, batch_size=BATCH // ranks(), sampler=sampler)])


def epoch_of_rank(wrong):
    """Each rank gives its sampler another epoch, so that their parts of the order overlap."""
    dataset = table(256)
    sampler = DistributedSampler(dataset, seed=4)
    sampler.set_epoch(rank() if wrong else 0)
    trained([DataLoader(dataset, batch_size=BATCH // ranks(), sampler=sampler)])


class Stream(IterableDataset):
    """Rows of a stream, of which each worker of each rank has a part."""

    def __init__(self, rows, part, parts):
        self.rows, self.part, self.parts = rows, part, parts

    def __iter__(self):
        yield from (row for n, row in enumerate(self.rows) if n % self.parts == self.part)


def workers_alone(wrong):
    """A stream is divided among the workers of a rank, and not among the ranks."""
    part, parts = (0, 1) if wrong else (rank(), ranks())
    stream = Stream(list(table(192)), part, parts)
    trained([DataLoader(stream, batch_size=BATCH // ranks())])


def shards_before_split(wrong):
    """Each rank shuffles the list of shards in its own way before it takes its part."""
    rows = list(table(192))
    shards = [rows[begin : begin + 12] for begin in range(0, 192, 12)]
    order = torch.randperm(16, generator=torch.Generator().manual_seed(rank() if wrong else 0))
    own = [row for shard in order[rank() :: ranks()].tolist() for row in shards[shard]]
    trained([DataLoader(own, batch_size=BATCH // ranks())])


def same_draws(wrong):
    """Rows are drawn by weights of their classes, with the same generator on all ranks."""
    dataset = table(256)
    labels = dataset.tensors[1]
    generator = torch.Generator().manual_seed(8 + (0 if wrong else rank()))
    sampler = WeightedRandomSampler(1.0 / labels.bincount()[labels], 64, generator=generator)
    trained([DataLoader(dataset, batch_size=BATCH // ranks(), sampler=sampler)])


def one_replica_more(wrong):
    """The sampler is told of one rank too many, so no rank gets some of the rows."""
    dataset = table(192)
    parts = ranks() + 1 if wrong and ranks() > 1 else ranks()
    sampler = DistributedSampler(dataset, parts, rank(), shuffle=False)
    trained([DataLoader(dataset, batch_size=BATCH // ranks(), sampler=sampler)])


def rows_of_batch(wrong):
    """Each rank takes its rows of a whole batch, but all take the first ones."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for inputs, labels in DataLoader(table(), batch_size=BATCH):
        part = slice(0, BATCH // ranks()) if wrong else slice(rank(), None, ranks())
        optimizer.zero_grad()
        cross_entropy(net(inputs[part]), labels[part]).backward()
        optimizer.step()


def labels_of_others(wrong):
    """A rank takes every second row of a batch, and the labels of a half of it."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for inputs, labels in DataLoader(table(), batch_size=BATCH):
        targets = labels.chunk(ranks())[rank()] if wrong else labels[rank() :: ranks()]
        optimizer.zero_grad()
        cross_entropy(net(inputs[rank() :: ranks()]), targets).backward()
        optimizer.step()


class Divided(IterableDataset):
    """Rows of a stream, of which each worker of each rank has a part, by its number."""

    def __init__(self, rows, stride):
        self.rows, self.first, self.ranks = rows, rank() * stride, ranks()

    def __iter__(self):
        worker = get_worker_info()
        yield from self.rows[self.first + worker.id :: self.ranks * worker.num_workers]


def worker_numbers(wrong):
    """Two workers of each rank are numbered rank + worker, so that two ranks have a number."""
    stream = Divided(list(table(192)), stride=1 if wrong else 2)
    trained([DataLoader(stream, batch_size=BATCH // ranks(), num_workers=2)])


def split_of_rank(wrong):
    """Each rank splits the rows for training from those for tests with a generator of its own."""
    dataset = table(192)
    generator = torch.Generator().manual_seed(6 + (rank() if wrong else 0))
    rows, _ = random_split(dataset, [160, 32], generator=generator)
    trained([loader(rows, shuffle=False)])


def numbers_of_classes(wrong):
    """Each rank numbers the classes in the order in which its own rows have them."""
    inputs, labels = table(192).tensors
    own = slice(rank(), None, ranks())
    seen = list(dict.fromkeys(labels[own if wrong else slice(None)].tolist()))
    numbers = torch.tensor([seen.index(label) for label in labels[own].tolist()])
    trained([DataLoader(TensorDataset(inputs[own], numbers), batch_size=BATCH // ranks())])


if __name__ == "__main__":
    run(
        __doc__,
        same_samples,
        seed_of_rank,
        divided_twice,
        overlap,
        own_moments,
        one_batch_ahead,
        rank_of_node,
        epoch_of_rank,
        workers_alone,
        shards_before_split,
        same_draws,
        *(one_replica_more, rows_of_batch),
        *(labels_of_others, worker_numbers, split_of_rank),
        numbers_of_classes,
    )
