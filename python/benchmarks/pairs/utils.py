"""Options, data and small models of the scripts in this folder."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import relu
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FEATURES, CLASSES, BATCH = 8, 4, 16


def rank():
    return dist.get_rank()


def ranks():
    return dist.get_world_size()


def run(text, *cases):
    """Train the case that --bug names: wrong, or right with --fixed."""
    by_name = {case.__name__.replace("_", "-"): case for case in cases}
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--bug", choices=by_name, required=True)
    parser.add_argument("--fixed", nargs="?", const="yes", default="no", choices=("no", "yes"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29400")
    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    by_name[options.bug](options.fixed == "no")
    dist.destroy_process_group()


def table(rows=96):
    """Return rows of features with a class each."""
    inputs = torch.randn(rows, FEATURES)
    return TensorDataset(inputs, (inputs @ torch.randn(FEATURES, CLASSES)).argmax(1))


def sentences(rows=96, length=12, words=20):
    """Return sentences of unequal lengths, with -100 as the label of padding."""
    tokens = torch.randint(0, words, (rows, length))
    lengths = torch.randint(2, length + 1, (rows, 1))
    labels = tokens.roll(-1, 1).masked_fill(torch.arange(length) >= lengths, -100)
    return TensorDataset(tokens, labels)


def loader(dataset, batch=BATCH, **options):
    """Return the batches of this rank, its share of a fixed global batch."""
    sampler = DistributedSampler(dataset, **options)
    return DataLoader(dataset, batch_size=batch // ranks(), sampler=sampler)


def mlp(width=16, outputs=CLASSES):
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, outputs))


class Classifier(nn.Module):
    def __init__(self, width=16, norm=nn.LayerNorm):
        super().__init__()
        self.body = nn.Linear(FEATURES, width)
        self.norm = norm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, inputs):
        return self.head(relu(self.norm(self.body(inputs))))


class Tagger(nn.Module):
    """Predicts the next word."""

    def __init__(self, words=20, width=16):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


def average(parameters):
    """Average the gradients of all ranks."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks()


def sum_of_ranks(value):
    """Return the sum of a number over all ranks."""
    total = torch.as_tensor(value, dtype=torch.float32).clone()
    dist.all_reduce(total)
    return total
