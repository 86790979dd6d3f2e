"""Known bugs of parallel training, each with its corrected twin.

    torchrun --nproc-per-node 2 parallel_bugs.py --bug sum [--fixed] [--seed 1]

One process with the same arguments trains correctly in both. Seven of them name a public report of
such a bug.
"""

import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

BATCH, CLASSES, WIDTH, STEPS = 24, 6, 16, 6
BUGS = (
    "no-exchange",  # verl-project/verl#7493: the gradient exchange is off without a message
    "sum",  # pytorch/pytorch#162338, pytorch/torchtitan#2318: sums in place of means
    "divided-twice",  # the transport averages, and the script divides again
    "sum-per-pass",  # NVIDIA/Megatron-LM#6660: reduced after each pass that adds to it
    "last-pass",  # exchanged before the last pass, as with a misplaced no_sync()
    "accumulation",  # verl-project/verl#3332: passes are not divided by their number
    "token-mean",  # pytorch/torchtitan#1842, #2206: a mean over each rank's own valid labels
    "uneven",  # averaged without weights although shares differ
    "same-samples",  # no DistributedSampler
    "batch-per-rank",  # the batch of the command line is that of a rank
    "clip-first",  # each rank clips its own gradient
    "batch-norm",  # statistics of each rank's samples
    "tied-twice",  # NVIDIA/Megatron-LM#844: a tied weight is reduced under both of its names
    "other-start",  # weights are seeded by rank, and nobody sends them
    "late-drift",  # NVIDIA/Megatron-LM#7452: one rank stops to take the exchanged gradient
    "head-alone",  # a part of the model is trained by rank 0 only
    "learning-rate",  # multiplied by the number of ranks although the global batch is fixed
    "second-optimiser",  # a GAN whose discriminator is not exchanged
)


class Classifier(nn.Module):
    def __init__(self, normalise: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Linear(CLASSES, WIDTH, bias=False)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.normalise = normalise(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.normalise(self.hidden(self.embedding(inputs))))
        return self.head(hidden)


class Tied(nn.Module):
    """The embedding is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, CLASSES, bias=False)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(inputs @ self.embedding.weight)))


@dataclass
class Training:
    """One rank at one step. own: the samples of each rank."""

    model: nn.Module
    parameters: list[nn.Parameter]
    rank: int
    ranks: int
    own: list[int]
    step: int = 0


def exchange(parameters, factor: float) -> None:
    """Sum the gradients over all ranks, and multiply them."""
    for parameter in parameters:
        if dist.is_initialized():
            dist.all_reduce(parameter.grad)
        parameter.grad.mul_(factor)


def place() -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def shares(bug: str, fixed: bool, ranks: int) -> list[int]:
    """Return the samples of each rank."""
    if bug == "uneven" and ranks > 1:
        return [2 * BATCH // 3, BATCH // 3]
    if bug == "batch-per-rank" and not fixed:
        return [BATCH] * ranks
    return [BATCH // ranks] * ranks


def train(bug: str, fixed: bool, seed: int) -> None:
    rank, ranks = place()
    if ranks > 1:
        dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(STEPS * BATCH * 4, CLASSES, generator=generator)
    labels = torch.randint(0, CLASSES, (len(inputs),), generator=generator)
    if bug == "token-mean":  # labels of early samples are seldom valid
        valid = torch.rand(len(labels), generator=generator)
        late = (torch.arange(len(labels)) % BATCH) >= BATCH // 2
        labels[(valid < 0.7) & ~late] = -100
    torch.manual_seed(seed + (rank if bug == "other-start" and not fixed else 0))
    normalise = nn.BatchNorm1d if bug == "batch-norm" and not fixed else nn.LayerNorm
    model = Tied() if bug == "tied-twice" else Classifier(normalise)
    parameters = list(model.parameters())
    rate = 0.1 * (ranks if bug == "learning-rate" and not fixed else 1)
    optimizer = torch.optim.SGD(parameters, lr=rate, momentum=0.9)
    own = shares(bug, fixed, ranks)
    begin = 0 if bug == "same-samples" and not fixed else sum(own[:rank])
    whole = sum(own) if bug == "batch-per-rank" and not fixed else BATCH
    training = Training(model, parameters, rank, ranks, own)
    passes = 2 if bug in ("accumulation", "last-pass", "sum-per-pass") else 1
    for step in range(STEPS):
        low = step * whole + begin
        taken = slice(low, low + own[rank])
        batch = torch.utils.data.TensorDataset(inputs[taken], labels[taken])
        loader = torch.utils.data.DataLoader(batch, batch_size=own[rank] // passes)
        optimizer.zero_grad()
        for number, (samples, targets) in enumerate(loader):
            loss = cross_entropy(model(samples), targets)
            if bug == "token-mean" and fixed:
                counted = (targets != -100).sum()
                total = counted.clone()
                if ranks > 1:
                    dist.all_reduce(total)
                loss = loss * counted * ranks / total
            if passes > 1 and not (bug == "accumulation" and not fixed and ranks > 1):
                loss = loss / passes
            loss.backward()
            is_last = number == passes - 1
            early = bug == "last-pass" and not fixed
            if bug == "sum-per-pass" and not fixed:
                exchange(parameters, 1.0)
                if is_last:
                    for parameter in parameters:
                        parameter.grad.div_(ranks)
            elif is_last is not early:
                training.step = step
                reduce(bug, training, fixed=fixed)
        optimizer.step()
    if ranks > 1:
        dist.destroy_process_group()


def nothing(_training: Training) -> None:
    pass


def total(training: Training) -> None:
    exchange(training.parameters, 1.0)


def mean(training: Training) -> None:
    exchange(training.parameters, 1 / training.ranks)


def mean_of_mean(training: Training) -> None:
    exchange(training.parameters, 1 / training.ranks**2)


def weighted_mean(training: Training) -> None:
    for parameter in training.parameters:
        parameter.grad.mul_(training.own[training.rank] * training.ranks / sum(training.own))
    mean(training)


def every_name(training: Training) -> None:
    for _, parameter in training.model.named_parameters(remove_duplicate=False):
        dist.all_reduce(parameter.grad)
    for parameter in training.parameters:
        parameter.grad.div_(training.ranks)


def mean_until_later(training: Training) -> None:
    before = [parameter.grad.clone() for parameter in training.parameters]
    mean(training)
    if training.rank == 1 and training.step >= 2:
        for parameter, gradient in zip(training.parameters, before, strict=True):
            parameter.grad.copy_(gradient)


def mean_without_head(training: Training) -> None:
    head = {id(parameter) for parameter in training.model.head.parameters()}
    exchange([p for p in training.parameters if id(p) not in head], 1 / training.ranks)
    if training.rank:
        for parameter in training.model.head.parameters():
            parameter.grad.zero_()


WRONG = {
    "no-exchange": nothing,
    "sum": total,
    "divided-twice": mean_of_mean,
    "tied-twice": every_name,
    "late-drift": mean_until_later,
    "head-alone": mean_without_head,
}


def reduce(bug: str, training: Training, *, fixed: bool) -> None:
    """Average the gradients of all ranks, or make a mistake."""
    clips = bug == "clip-first"
    if clips and not fixed:
        torch.nn.utils.clip_grad_norm_(training.parameters, 0.05)
    if training.ranks > 1 and bug == "uneven" and fixed:
        weighted_mean(training)
    elif training.ranks > 1:
        (mean if fixed else WRONG.get(bug, mean))(training)
    if clips and fixed:
        torch.nn.utils.clip_grad_norm_(training.parameters, 0.05)


def train_gan(fixed: bool, seed: int) -> None:
    rank, ranks = place()
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(seed)
    generator, discriminator = nn.Linear(CLASSES, WIDTH), nn.Linear(WIDTH, 1)
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.05) for model in (discriminator, generator)
    ]
    data = torch.randn(STEPS * BATCH, CLASSES), torch.randn(STEPS * BATCH, WIDTH)
    share = BATCH // ranks
    for step in range(STEPS):
        low = step * BATCH + rank * share
        noise, real = (tensor[low : low + share] for tensor in data)
        for number, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            made = generator(noise)
            if number:
                loss = -discriminator(made).mean()
            else:
                loss = (discriminator(made.detach()) - discriminator(real)).mean()
            loss.backward()
            if ranks > 1 and (fixed or number):
                parameters = (generator if number else discriminator).parameters()
                exchange(parameters, 1 / ranks)
            optimizer.step()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bug", choices=BUGS, required=True)
    parser.add_argument("--fixed", nargs="?", const="yes", default="no", choices=("no", "yes"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.bug == "second-optimiser":
        train_gan(options.fixed == "yes", options.seed)
    else:
        train(options.bug, options.fixed == "yes", options.seed)
