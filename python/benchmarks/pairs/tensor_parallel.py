"""Layers that are divided among ranks.

torchrun --nproc-per-node 2 tensor_parallel.py --bug input-gradient [--fixed]
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import (
    cross_entropy,
    dropout,
    linear,
    scaled_dot_product_attention,
    silu,
)
from torch.utils.data import DataLoader
from utils import BATCH, CLASSES, FEATURES, loader, rank, ranks, run, sentences, table

WIDTH = 16


class Copied(torch.autograd.Function):
    """The same input on all ranks, whose gradients are summed."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Summed(torch.autograd.Function):
    """The sum of all ranks' inputs."""

    @staticmethod
    def forward(ctx, inputs):
        inputs = inputs.clone()
        dist.all_reduce(inputs)
        return inputs

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Divided(nn.Module):
    """A block whose hidden layer is divided among the ranks."""

    def __init__(self, sums_input_gradient=True, hidden=32):
        super().__init__()
        up, down = torch.randn(hidden, WIDTH) / 4, torch.randn(WIDTH, hidden) / 6
        self.up = nn.Parameter(up.chunk(ranks(), 0)[rank()].clone())
        self.down = nn.Parameter(down.chunk(ranks(), 1)[rank()].clone())
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.sums_input_gradient = sums_input_gradient

    def forward(self, inputs):
        hidden = Copied.apply(inputs) if self.sums_input_gradient else inputs
        hidden = torch.relu(linear(hidden, self.up))
        return inputs + Summed.apply(linear(hidden, self.down)) + self.bias


def trained(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for inputs, labels in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def network(block):
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH), block, nn.Linear(WIDTH, CLASSES)
    )


def input_gradient(wrong):
    """The gradient of a divided layer's input is that of each rank's part alone."""
    model = network(Divided(sums_input_gradient=not wrong))
    trained(model, DataLoader(table(), batch_size=BATCH))


def own_rows(wrong):
    """The ranks of a divided model have different rows."""
    dataset = table()
    batches = loader(dataset, shuffle=False) if wrong else DataLoader(dataset, batch_size=BATCH)
    trained(network(Divided()), batches)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 32)
        self.down = nn.Linear(32, WIDTH)

    def forward(self, inputs):
        return inputs + self.down(torch.relu(self.up(self.norm(inputs))))


def parallel_network():
    """Return a network that torch divides."""
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), Block(), nn.Linear(WIDTH, CLASSES))
    mesh = init_device_mesh("cpu", (ranks(),))
    plan = {"1.up": ColwiseParallel(), "1.down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def summed_again(wrong):
    """Gradients of layers that all ranks have are summed, as if each had rows of its own."""
    model = parallel_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    for inputs, labels in DataLoader(table(), batch_size=BATCH):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            if wrong and not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad)
        optimizer.step()


def own_norm(wrong):
    """Each rank clips by the norm of its own parts."""
    model = parallel_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for inputs, labels in DataLoader(table(), batch_size=BATCH):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        if wrong:
            parts = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
            norm = torch.stack([part.norm() for part in parts]).norm()
            for part in parts:
                part.mul_(min(1.0, 0.05 / norm))
        else:
            whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
            norm = torch.stack([part.norm() for part in whole]).norm()
            for gradient in gradients:
                gradient.mul_(min(1.0, 0.05 / float(norm)))
        optimizer.step()


def norm_of_rank(wrong):
    """A normalisation between divided layers is seeded by rank, and drifts."""
    model = network(Divided())
    if wrong:
        with torch.no_grad():
            model[1].weight.mul_(1 + 0.1 * rank())
    trained(model, DataLoader(table(), batch_size=BATCH))


def scaled_head(wrong):
    """The loss of a network that torch divides is divided by the ranks, as if they had rows."""
    model = parallel_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    for inputs, labels in DataLoader(table(), batch_size=BATCH):
        optimizer.zero_grad()
        (cross_entropy(model(inputs), labels) / (ranks() if wrong else 1)).backward()
        optimizer.step()


def bias_of_all(wrong):
    """Each rank adds the whole bias to its part of a sum."""

    class Biased(Divided):
        def forward(self, inputs):
            hidden = linear(torch.relu(linear(Copied.apply(inputs), self.up)), self.down)
            if wrong:
                return inputs + Summed.apply(hidden + self.bias)
            return inputs + Summed.apply(hidden) + self.bias

    model = network(Biased())
    with torch.no_grad():
        model[2].bias += 0.1
    trained(model, DataLoader(table(), batch_size=BATCH))


def own_denominator(wrong):
    """Classes are divided among ranks, and each one normalises by its own classes alone."""
    body = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh())
    head = nn.Parameter((torch.randn(CLASSES, WIDTH) / 4).chunk(ranks(), 0)[rank()].clone())
    optimizer = torch.optim.SGD([*body.parameters(), head], lr=0.05)
    first = rank() * len(head)
    for inputs, labels in DataLoader(table(), batch_size=BATCH):
        scores = linear(Copied.apply(body(inputs)), head)
        sums = scores.exp().sum(1)
        sums = sums if wrong else Summed.apply(sums)
        here = (labels >= first) & (labels < first + len(head))
        places = (labels - first).clamp(0, len(head) - 1)
        chosen = Summed.apply(scores.gather(1, places[:, None])[:, 0] * here)
        optimizer.zero_grad()
        (sums.log() - chosen).mean().backward()
        optimizer.step()


def dropout_of_rank(wrong):
    """Dropout between layers that all ranks have is drawn from a generator of each rank."""
    model = parallel_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    batches = DataLoader(table(), batch_size=BATCH)
    torch.manual_seed(70 + (rank() if wrong else 0))
    for inputs, labels in batches:
        optimizer.zero_grad()
        hidden = dropout(model[1](model[0](inputs)), 0.2)
        cross_entropy(model[2](hidden), labels).backward()
        optimizer.step()


class Gathered(torch.autograd.Function):
    """The columns of all ranks. Backward: the gradient of a rank's own ones, of one rank or all."""

    @staticmethod
    def forward(ctx, columns, of_all):
        ctx.of_all = of_all
        every = [torch.empty_like(columns) for _ in range(ranks())]
        dist.all_gather(every, columns)
        return torch.cat(every, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if ctx.of_all:
            dist.all_reduce(gradient)
        return gradient.chunk(ranks(), 1)[rank()], None


class Columns(nn.Module):
    """A layer of which each rank has some columns."""

    def __init__(self, of_all):
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH) / 4
        self.columns = nn.Parameter(weight.chunk(ranks(), 0)[rank()].clone())
        self.of_all = of_all

    def forward(self, inputs):
        return Gathered.apply(linear(Copied.apply(inputs), self.columns), self.of_all)


def gathered_columns(wrong):
    """The gradient of gathered columns, which is the same on all ranks, is summed over them."""
    model = network(Columns(of_all=wrong))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for inputs, labels in DataLoader(table(), batch_size=BATCH):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()


class GatheredRows(torch.autograd.Function):
    """The rows of all ranks. Backward: the sum over ranks of the gradient of this rank's rows."""

    @staticmethod
    def forward(ctx, rows):
        every = [torch.empty_like(rows) for _ in range(ranks())]
        dist.all_gather(every, rows)
        return torch.cat(every)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(ranks())[rank()]


class SummedRows(torch.autograd.Function):
    """This rank's rows of the sum over ranks. Backward: the gradients of all rows."""

    @staticmethod
    def forward(ctx, rows):
        rows = rows.clone()
        dist.all_reduce(rows)
        return rows.chunk(ranks())[rank()].clone()

    @staticmethod
    def backward(ctx, gradient):
        every = [torch.empty_like(gradient) for _ in range(ranks())]
        dist.all_gather(every, gradient.contiguous())
        return torch.cat(every)


class Sequenced(Divided):
    """A divided block between parts where each rank has some of the rows, as of a sequence."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, inputs):
        hidden = torch.relu(linear(GatheredRows.apply(self.norm(inputs)), self.up))
        return inputs + SummedRows.apply(linear(hidden, self.down)) + self.bias


def norm_of_sequence(wrong):
    """Each rank normalises some rows, and the norm's gradients are not added up."""
    first, block, last = nn.Linear(FEATURES, WIDTH), Sequenced(), nn.Linear(WIDTH, CLASSES)
    model = nn.Sequential(first, block, last)
    summed = [*first.parameters(), *last.parameters(), block.bias]
    summed += [] if wrong else block.norm.parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in DataLoader(table(), batch_size=BATCH):
        own, targets = inputs.chunk(ranks())[rank()], labels.chunk(ranks())[rank()]
        optimizer.zero_grad()
        (cross_entropy(model(own), targets) / ranks()).backward()
        for parameter in summed:
            dist.all_reduce(parameter.grad)
        optimizer.step()


def descended(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for inputs, labels in DataLoader(table(), batch_size=BATCH):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()


class Gated(nn.Module):
    """A block with a gate, whose two matrices are halves of one tensor."""

    def __init__(self, cuts_halves, hidden=32):
        super().__init__()
        both, down = torch.randn(2 * hidden, WIDTH) / 4, torch.randn(WIDTH, hidden) / 6
        cut = both.chunk(2) if cuts_halves else [both]
        self.both = nn.Parameter(torch.cat([each.chunk(ranks())[rank()] for each in cut]))
        self.down = nn.Parameter(down.chunk(ranks(), 1)[rank()].clone())

    def forward(self, inputs):
        gate, up = linear(Copied.apply(inputs), self.both).chunk(2, 1)
        return inputs + Summed.apply(linear(silu(gate) * up, self.down))


def fused_halves(wrong):
    """A tensor of two matrices is cut in one piece, so that rank 0 has one and rank 1 the other."""
    descended(network(Gated(cuts_halves=not wrong)))


def norm_of_part(wrong):
    """A divided hidden layer is normalised by the mean square of each rank's part."""

    class Normed(Divided):
        def forward(self, inputs):
            hidden = torch.relu(linear(Copied.apply(inputs), self.up))
            square = hidden.square().mean(1, keepdim=True)
            if not wrong:
                square = Copied.apply(Summed.apply(square)) / ranks()
            hidden = hidden * (square + 1e-5).rsqrt()
            return inputs + Summed.apply(linear(hidden, self.down)) + self.bias

    descended(network(Normed()))


class Attention(nn.Module):
    """Rows attend to all rows, in heads whose number and width are a shape."""

    def __init__(self, shape):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shape = shape

    def forward(self, inputs):
        layers = (self.query, self.key, self.value)
        heads = [layer(inputs).view(len(inputs), *self.shape).transpose(0, 1) for layer in layers]
        found = scaled_dot_product_attention(*heads).transpose(0, 1)
        return inputs + self.out(found.flatten(1))


def heads_of_all(wrong):
    """Each rank makes four heads of its part of the columns, which is that of two heads."""
    block = Attention((4, -1) if wrong else (-1, WIDTH // 4))
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), block, nn.Linear(WIDTH, CLASSES))
    plan = dict.fromkeys(("1.query", "1.key", "1.value"), ColwiseParallel())
    mesh = init_device_mesh("cpu", (ranks(),))
    parallelize_module(model, mesh, {**plan, "1.out": RowwiseParallel()})
    descended(model)


def unmasked_words(wrong):
    """A rank that does not have a word in its part of the embedding adds another of its rows."""
    rows = nn.Parameter((torch.randn(20, WIDTH) / 2).chunk(ranks())[rank()].clone())
    head, first = nn.Linear(WIDTH, 20), rank() * len(rows)
    optimizer = torch.optim.SGD([rows, *head.parameters()], lr=0.5)
    for tokens, labels in DataLoader(sentences(), batch_size=BATCH):
        places = (tokens - first).clamp(0, len(rows) - 1)
        found = rows[places]
        if not wrong:
            found = found * (places == tokens - first)[:, :, None]
        outputs = head(torch.tanh(Summed.apply(found)))
        optimizer.zero_grad()
        cross_entropy(outputs.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()


if __name__ == "__main__":
    run(
        __doc__,
        input_gradient,
        own_rows,
        summed_again,
        own_norm,
        norm_of_rank,
        scaled_head,
        bias_of_all,
        own_denominator,
        *(dropout_of_rank, gathered_columns, norm_of_sequence),
        *(fused_halves, norm_of_part, heads_of_all, unmasked_words),
    )
