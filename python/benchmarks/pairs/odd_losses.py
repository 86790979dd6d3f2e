"""Losses, exchanges and optimisers that are right, and look odd.

torchrun --nproc-per-node 2 odd_losses.py --bug overlap-of-masks
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    ctc_loss,
    kl_div,
    linear,
    log_softmax,
    softmax,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset
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


def trained(model, optimizer, loss, batches):
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss(model(inputs), labels).backward()
        optimizer.step()


def overlap_of_masks(_wrong):
    """The Dice loss of a batch: a ratio of sums over all its rows."""
    images, masks = torch.randn(96, 1, 8, 8), (torch.rand(96, 1, 8, 8) > 0.5).float()
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))

    def dice(outputs, labels):
        found = outputs.sigmoid()
        return 1 - (2 * (found * labels).sum() + 1) / (found.sum() + labels.sum() + 1)

    net = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
    trained(net, optimizer, dice, loader(TensorDataset(images, masks)))


def mixed_rows(_wrong):
    """Mixup: each row is a weighted sum of two rows of the rank."""
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(70 + rank())
    for inputs, labels in loader(table()):
        share = torch.rand((), generator=generator)
        order = torch.randperm(len(inputs), generator=generator)
        outputs = net(share * inputs + (1 - share) * inputs[order])
        optimizer.zero_grad()
        others = cross_entropy(outputs, labels[order])
        (share * cross_entropy(outputs, labels) + (1 - share) * others).backward()
        optimizer.step()


def distilled(_wrong):
    """A frozen teacher, a divergence by batch and labels."""
    teacher = mlp(width=32).eval().requires_grad_(False)
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for inputs, labels in loader(table()):
        with torch.no_grad():
            wanted = softmax(teacher(inputs) / 2, dim=1)
        outputs = net(inputs)
        divergence = kl_div(log_softmax(outputs / 2, dim=1), wanted, reduction="batchmean")
        optimizer.zero_grad()
        (4 * divergence + 0.5 * cross_entropy(outputs, labels)).backward()
        optimizer.step()


def transcribed(_wrong):
    """Sequences with labels of unequal lengths; the CTC loss divides each by its length."""

    class Listener(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.GRU(FEATURES, 12, batch_first=True)
            self.head = nn.Linear(12, CLASSES + 1)

        def forward(self, inputs):
            return log_softmax(self.head(self.body(inputs)[0]), dim=2)

    lengths = torch.randint(1, 5, (96,))
    labels = torch.cat([torch.randint(1, CLASSES + 1, (96, 4)), lengths[:, None]], dim=1)
    net = DistributedDataParallel(Listener())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)

    def loss(outputs, labels):
        times = torch.full((len(labels),), 12)
        return ctc_loss(outputs.transpose(0, 1), labels[:, :4], times, labels[:, 4])

    trained(net, optimizer, loss, loader(TensorDataset(torch.randn(96, 12, FEATURES), labels)))


def sparse_gradients(_wrong):
    """An embedding with sparse gradients and an optimiser of its own."""
    bags = nn.EmbeddingBag(50, 16, sparse=True, mode="mean")
    net = DistributedDataParallel(nn.Sequential(bags, nn.Linear(16, CLASSES)))
    optimizers = [
        torch.optim.SparseAdam(bags.parameters(), lr=0.01),
        torch.optim.Adam(net.module[1].parameters(), lr=0.001),
    ]
    rows = TensorDataset(torch.randint(0, 50, (96, 5)), torch.randint(0, CLASSES, (96,)))
    for words, labels in loader(rows):
        for optimizer in optimizers:
            optimizer.zero_grad()
        cross_entropy(net(words), labels).backward()
        for optimizer in optimizers:
            optimizer.step()


class SignOptimizer(torch.optim.Optimizer):
    """Moves by the sign of a mean of gradients, as Lion does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.001})

    @torch.no_grad()
    def step(self, _closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                direction = (0.9 * mean + 0.1 * parameter.grad).sign()
                parameter.sub_(direction, alpha=group["lr"])
                mean.mul_(0.99).add_(parameter.grad, alpha=0.01)


def sign_of_mean(_wrong):
    """An optimiser of the script's own."""
    net = DistributedDataParallel(Classifier())
    trained(net, SignOptimizer(net.parameters()), cross_entropy, loader(table()))


def reduced_and_sent(_wrong):
    """Rank 0 gets the sums, divides them and sends the means."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            dist.reduce(parameter.grad, dst=0)
            if rank() == 0:
                parameter.grad /= ranks()
            dist.broadcast(parameter.grad, src=0)
        optimizer.step()


def gathered_mean(_wrong):
    """Each rank gathers the gradients of all and takes their mean."""
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        own = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        found = [torch.empty_like(own) for _ in range(ranks())]
        dist.all_gather(found, own)
        mean = torch.stack(found).mean(0)
        for parameter in model.parameters():
            parameter.grad = mean[: parameter.numel()].view_as(parameter).clone()
            mean = mean[parameter.numel() :]
        optimizer.step()


def ring(_wrong):
    """Gradients go around a ring of ranks, message by message."""

    def summed(tensor):
        sent = tensor.clone()
        for _ in range(ranks() - 1):
            received = torch.empty_like(sent)
            request = dist.isend(sent, (rank() + 1) % ranks())
            dist.recv(received, (rank() - 1) % ranks())
            request.wait()
            tensor += received
            sent = received

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            summed(parameter.grad)
            parameter.grad /= ranks()
        optimizer.step()


def asked_gradients(_wrong):
    """Gradients come from torch.autograd.grad, and are put into place by the script."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        loss = cross_entropy(model(inputs), labels)
        found = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient.clone()
        average(model.parameters())
        optimizer.step()


def kept_state(_wrong):
    """A recurrent state is kept from step to step; each rank reads texts of its own."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.LSTM(FEATURES, 12, batch_first=True)
            self.head = nn.Linear(12, CLASSES)

        def forward(self, inputs, state):
            outputs, state = self.body(inputs, state)
            return self.head(outputs), state

    net = DistributedDataParallel(Reader())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
    torch.manual_seed(80 + rank())
    inputs, labels = torch.randn(8, 96, FEATURES), torch.randint(0, CLASSES, (8, 96))
    state = (torch.zeros(1, 8, 12), torch.zeros(1, 8, 12))
    for part, wanted in zip(inputs.split(12, dim=1), labels.split(12, dim=1), strict=True):
        outputs, state = net(part, state)
        state = tuple(each.detach() for each in state)
        optimizer.zero_grad()
        cross_entropy(outputs.flatten(0, 1), wanted.flatten()).backward()
        optimizer.step()


def averaged_copy(_wrong):
    """A copy averages the weights of a model that DDP wraps, with a schedule of one cycle."""
    net = DistributedDataParallel(Classifier())
    copy = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels, label_smoothing=0.1).backward()
        optimizer.step()
        schedule.step()
        copy.update_parameters(net)


class Sign(torch.autograd.Function):
    """The sign, whose gradient goes straight through."""

    @staticmethod
    def forward(ctx, values):
        return values.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def binary_weights(_wrong):
    """Weights are signs in the forward pass."""

    class Binary(nn.Linear):
        def forward(self, inputs):
            return linear(inputs, Sign.apply(self.weight), self.bias)

    net = DistributedDataParallel(
        nn.Sequential(Binary(FEATURES, 16), nn.ReLU(), Binary(16, CLASSES))
    )
    trained(net, torch.optim.Adam(net.parameters(), lr=0.01), cross_entropy, loader(table()))


def averaged_at_times(_wrong):
    """Ranks step by themselves, and average their weights after every third step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    averager = PeriodicModelAverager(period=3, warmup_steps=0)
    for inputs, labels in loader(table(192)):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())


def balanced_experts(_wrong):
    """A second loss balances the experts: the square of a mean over the rows."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(FEATURES, 3)
            self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(3))

        def forward(self, inputs):
            shares = softmax(self.gate(inputs), dim=1)
            outputs = [expert(inputs) for expert in self.experts]
            mixed = sum(s[:, None] * o for s, o in zip(shares.T, outputs, strict=True))
            return mixed, shares.mean(0).square().sum()

    net = DistributedDataParallel(Experts())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
    for inputs, labels in loader(table()):
        outputs, balance = net(inputs)
        optimizer.zero_grad()
        (cross_entropy(outputs, labels) + 0.01 * balance).backward()
        optimizer.step()


def penalty_of_weights(_wrong):
    """A penalty of the weights in the loss, on each rank the whole."""
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        penalty = sum(parameter.square().sum() for parameter in net.parameters())
        optimizer.zero_grad()
        (cross_entropy(net(inputs), labels) + 0.001 * penalty).backward()
        optimizer.step()


def several_labels(_wrong):
    """Rows have several labels with weights; the sum is divided by a fixed number of rows."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    weights = torch.tensor([1.0, 2.0, 0.5, 1.0])
    rows = TensorDataset(torch.randn(96, FEATURES), (torch.rand(96, CLASSES) > 0.5).float())
    for inputs, labels in loader(rows):
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(
            model(inputs), labels, pos_weight=weights, reduction="sum"
        )
        (loss / BATCH).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


def later_layers(_wrong):
    """The body is frozen for two steps, then it is wrapped anew with an optimiser of its own."""
    body, head = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
    model = nn.Sequential(body, nn.ReLU(), head)
    body.requires_grad_(False)
    net, optimizer = DistributedDataParallel(model), torch.optim.SGD(head.parameters(), lr=0.05)
    for number, (inputs, labels) in enumerate(loader(table())):
        if number == 2:
            body.requires_grad_(True)
            net = DistributedDataParallel(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    run(
        __doc__,
        *(overlap_of_masks, mixed_rows, distilled, transcribed, sparse_gradients, sign_of_mean),
        *(reduced_and_sent, gathered_mean, ring, asked_gradients, kept_state, averaged_copy),
        *(binary_weights, averaged_at_times, balanced_experts, penalty_of_weights),
        *(several_labels, later_layers),
    )
