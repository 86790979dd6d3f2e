"""Scripts that are right, and look odd.

torchrun --nproc-per-node 2 odd.py --bug own-sampler
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy, l1_loss, mse_loss, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Sampler
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


def trained(net, optimizer, batches, criterion=cross_entropy):
    for inputs, labels in batches:
        optimizer.zero_grad()
        criterion(net(inputs), labels).backward()
        optimizer.step()


class Weighted(Sampler):
    """Draws rows with replacement, other ones on each rank."""

    def __init__(self, weights, count):
        self.weights, self.count = weights, count

    def __iter__(self):
        generator = torch.Generator().manual_seed(50 + rank())
        yield from torch.multinomial(self.weights, self.count, True, generator=generator).tolist()

    def __len__(self):
        return self.count


def own_sampler(_wrong):
    """Rows are drawn with replacement, by weights of their classes."""
    dataset = table(256)
    counts = dataset.tensors[1].bincount(minlength=CLASSES)
    sampler = Weighted(1.0 / counts[dataset.tensors[1]], 64)
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    trained(net, optimizer, DataLoader(dataset, batch_size=8, sampler=sampler))


def frozen_layers(_wrong):
    """The body is frozen, and only the head is trained."""
    model = Classifier()
    model.body.requires_grad_(False)
    model.norm.requires_grad_(False)
    net = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=0.01)
    trained(net, optimizer, loader(table()))


def several_optimisers(_wrong):
    """Each part of the model has an optimiser of its own."""
    net = DistributedDataParallel(Classifier())
    body = [*net.module.body.parameters(), *net.module.norm.parameters()]
    optimizers = torch.optim.SGD(body, lr=0.02), torch.optim.Adam(net.module.head.parameters())
    for inputs, labels in loader(table()):
        for optimizer in optimizers:
            optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        for optimizer in optimizers:
            optimizer.step()


def average_of_weights(_wrong):
    """Rank 0 alone keeps an exponential moving average of the weights."""
    net = DistributedDataParallel(mlp())
    mean = copy.deepcopy(net.module) if rank() == 0 else None
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        if mean is not None:
            with torch.no_grad():
                for ours, theirs in zip(mean.parameters(), net.module.parameters(), strict=True):
                    ours.lerp_(theirs, 0.1)


def joined(_wrong):
    """Ranks have different numbers of batches, under DDP's join()."""
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    inputs, labels = table(96).tensors
    size = 96 if ranks() == 1 else (56, 40)[rank()]
    begin = 56 * rank()
    with net.join():
        for own in torch.arange(begin, begin + size).split(8):
            optimizer.zero_grad()
            cross_entropy(net(inputs[own]), labels[own]).backward()
            optimizer.step()


class Recomputed(nn.Module):
    """Computes its hidden layers again in the backward pass."""

    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(3))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = checkpoint(
                lambda rows, block=block: torch.tanh(block(rows)), inputs, use_reentrant=False
            )
        return self.head(inputs)


def recomputed(_wrong):
    """Gradient checkpointing."""
    net = DistributedDataParallel(Recomputed(), static_graph=True)
    trained(net, torch.optim.AdamW(net.parameters(), lr=0.01), loader(table()))


def line_search(_wrong):
    """LBFGS evaluates its closure several times in a step, with an exchange in each."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3)
    for inputs, labels in loader(table()):

        def closure(inputs=inputs, labels=labels):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            average(model.parameters())
            return sum_of_ranks(loss.detach()) / ranks()

        optimizer.step(closure)


class Series(nn.Module):
    """Takes a list of tensors of different lengths."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(FEATURES, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, rows):
        return torch.stack([self.head(torch.relu(self.body(each)).mean(0)) for each in rows])


def lists(_wrong):
    """A batch is a list of tensors of different lengths."""
    lengths = torch.randint(2, 9, (96,)).tolist()
    rows = [torch.randn(length, FEATURES) for length in lengths]
    dataset = [(row, int(row.sum() > 0)) for row in rows]
    sampler = torch.utils.data.DistributedSampler(dataset)
    batches = DataLoader(
        dataset, batch_size=BATCH // ranks(), sampler=sampler, collate_fn=lambda each: each
    )
    net = DistributedDataParallel(Series())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for batch in batches:
        optimizer.zero_grad()
        labels = torch.tensor([label for _, label in batch])
        cross_entropy(net([row for row, _ in batch]), labels).backward()
        optimizer.step()


def token_budget(_wrong):
    """Batches have so many sentences as a budget of tokens allows."""
    tokens, labels = sentences(160).tensors
    net = DistributedDataParallel(Tagger())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    own = iter(range(rank(), 160, ranks()))
    for _ in range(8):
        chosen, size = [], 0
        while size < 48:
            chosen.append(next(own))
            size += int((labels[chosen[-1]] != -100).sum()) + 1
        targets = labels[chosen].flatten()
        total = sum_of_ranks((targets != -100).sum())
        optimizer.zero_grad()
        losses = cross_entropy(net(tokens[chosen]).flatten(0, 1), targets, reduction="sum")
        (losses * ranks() / total).backward()
        optimizer.step()


def hooks(_wrong):
    """Each parameter's hook exchanges its gradient as soon as it is complete."""
    model = Classifier()

    def exchange(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(ranks())

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(exchange)
    trained(model, torch.optim.SGD(model.parameters(), lr=0.05), loader(table()))


def flat_gradient(_wrong):
    """All gradients are parts of one tensor, which is exchanged."""
    model = Classifier()
    parameters = list(model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    for inputs, labels in loader(table()):
        flat.zero_()
        cross_entropy(model(inputs), labels).backward()
        dist.all_reduce(flat)
        flat.div_(ranks())
        optimizer.step()


def divided_optimiser(_wrong):
    """ZeroRedundancyOptimizer steps a part of the weights on each rank."""
    net = DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
    )
    trained(net, optimizer, loader(table()))


class SumOverRanks(torch.autograd.Function):
    """A sum over all ranks, with its gradient."""

    @staticmethod
    def forward(ctx, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class GlobalNorm(nn.Module):
    """Normalises by the moments of all ranks' rows."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, rows):
        moments = SumOverRanks.apply(torch.stack([rows.sum(0), rows.square().sum(0)]))
        mean, square = moments / (len(rows) * ranks())
        return (rows - mean) * (square - mean.square() + 1e-5).rsqrt() * self.weight + self.bias


def global_norm(_wrong):
    """An own normalisation by the rows of all ranks."""
    model = Classifier(norm=GlobalNorm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        average(model.parameters())
        optimizer.step()


def uneven_end(_wrong):
    """The last batch has fewer rows, and is weighted by them."""
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    inputs, labels = table(99).tensors
    for batch in torch.arange(99).split(16):
        own = batch[rank() :: ranks()]
        optimizer.zero_grad()
        losses = cross_entropy(net(inputs[own]), labels[own], reduction="sum")
        (losses * ranks() / len(batch)).backward()
        optimizer.step()


def masked_words(_wrong):
    """A masked loss divides by the words of all ranks, in two accumulated passes."""
    net = DistributedDataParallel(Tagger())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for tokens, labels in loader(sentences()):
        parts = list(zip(tokens.chunk(2), labels.chunk(2), strict=True))
        total = sum_of_ranks((labels != -100).sum())
        optimizer.zero_grad()
        for place, (part, targets) in enumerate(parts):
            net.require_backward_grad_sync = place == len(parts) - 1
            losses = cross_entropy(net(part).flatten(0, 1), targets.flatten(), reduction="sum")
            (losses * ranks() / total).backward()
        optimizer.step()


class Gathered(torch.autograd.Function):
    """The rows of all ranks; the gradient of this rank's ones returns."""

    @staticmethod
    def forward(ctx, rows):
        every = [torch.empty_like(rows) for _ in range(ranks())]
        dist.all_gather(every, rows.contiguous())
        return torch.cat(every)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(ranks())[rank()]


def contrastive(_wrong):
    """Rows are contrasted with those of all ranks, through an exchange with a gradient."""
    net = DistributedDataParallel(mlp(outputs=8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for inputs, _ in loader(table()):
        one = normalize(net(inputs))
        other = normalize(net(inputs.flip(1)))
        scores = one @ Gathered.apply(other).T / 0.2
        optimizer.zero_grad()
        cross_entropy(scores, rank() * len(one) + torch.arange(len(one))).backward()
        optimizer.step()


def batch_per_rank(_wrong):
    """Each rank makes rows from a generator of its own."""
    net = DistributedDataParallel(mlp(outputs=FEATURES))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1000 + rank())
    for _ in range(8):
        inputs = torch.randn(8, FEATURES, generator=generator)
        optimizer.zero_grad()
        mse_loss(net(inputs), inputs.sin()).backward()
        optimizer.step()


def batch_norm(_wrong):
    """BatchNorm by the rows of each rank, as DDP has it."""
    net = DistributedDataParallel(Classifier(norm=nn.BatchNorm1d))
    trained(net, torch.optim.SGD(net.parameters(), lr=0.05), loader(table()))


def dropout(_wrong):
    """Dropout with a generator of its own on each rank."""
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    net = DistributedDataParallel(model)
    dataset = table()
    torch.manual_seed(70 + rank())
    trained(net, torch.optim.AdamW(net.parameters(), lr=0.01), loader(dataset))


def sharp_minima(_wrong):
    """Sharpness-aware minimisation: a second pass from weights that were moved."""
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        moves = [0.05 * parameter.grad for parameter in net.parameters()]
        with torch.no_grad():
            for parameter, move in zip(net.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        with torch.no_grad():
            for parameter, move in zip(net.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()


def joined_by_context(_wrong):
    """Ranks have different numbers of batches, under Join itself."""
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    inputs, labels = table(128).tensors
    size = 128 if ranks() == 1 else (72, 56)[rank()]
    with Join([net]):
        for own in torch.arange(72 * rank(), 72 * rank() + size).split(8):
            optimizer.zero_grad()
            cross_entropy(net(inputs[own]), labels[own]).backward()
            optimizer.step()


def actor_critic(_wrong):
    """A policy and a value are trained for two epochs on rows that each rank has collected."""
    policy, value = DistributedDataParallel(mlp()), DistributedDataParallel(mlp(outputs=1))
    weights = [*policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(weights, lr=0.01)
    generator = torch.Generator().manual_seed(30 + rank())
    for _ in range(4):
        states = torch.randn(16, FEATURES, generator=generator)
        with torch.no_grad():
            actions = policy(states).argmax(1)
            rewards = states[:, 0] + (actions == 1)
        for _ in range(2):
            for own in torch.arange(16).split(8):
                optimizer.zero_grad()
                values = value(states[own]).squeeze(1)
                advantage = (rewards[own] - values).detach()
                chosen = -cross_entropy(policy(states[own]), actions[own], reduction="none")
                loss = -(advantage * chosen).mean() + 0.5 * (rewards[own] - values).square().mean()
                loss.backward()
                nn.utils.clip_grad_norm_(weights, 0.5)
                optimizer.step()


def unused_parameters(_wrong):
    """A branch is used in every second step, with find_unused_parameters."""

    class Branched(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.side = mlp(), mlp()

        def forward(self, inputs, *, has_side):
            outputs = self.main(inputs)
            return outputs + self.side(inputs) if has_side else outputs

    net = DistributedDataParallel(Branched(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step, (inputs, labels) in enumerate(loader(table())):
        optimizer.zero_grad()
        cross_entropy(net(inputs, has_side=step % 2 == 0), labels).backward()
        optimizer.step()


def autocast(_wrong):
    """Forward passes in bf16, weights and gradients in fp32."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = net(inputs)
        cross_entropy(outputs.float(), labels).backward()
        optimizer.step()


def recurrent(_wrong):
    """Sequences with time first, and a hidden state that is cut between parts of them."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.GRU(FEATURES, 12)
            self.head = nn.Linear(12, FEATURES)

        def forward(self, rows, hidden):
            outputs, hidden = self.body(rows, hidden)
            return self.head(outputs), hidden

    net = DistributedDataParallel(Recurrent())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    series = torch.randn(33, 16, FEATURES).cumsum(0) / 4
    own = series[:, rank() :: ranks()]
    hidden = torch.zeros(1, own.shape[1], 12)
    for begin in range(0, 32, 4):
        inputs, targets = own[begin : begin + 4], own[begin + 1 : begin + 5]
        optimizer.zero_grad()
        outputs, hidden = net(inputs, hidden.detach())
        mse_loss(outputs, targets).backward()
        optimizer.step()


def gradient_penalty(_wrong):
    """The loss has the norm of a gradient with respect to the inputs."""
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for inputs, labels in loader(table()):
        rows = inputs.clone().requires_grad_()
        scores = model(rows)
        [slope] = torch.autograd.grad(scores.sum(), rows, create_graph=True)
        loss = (scores.squeeze(1) - labels).square().mean() + (
            slope.norm(dim=1) - 1
        ).square().mean()
        optimizer.zero_grad()
        loss.backward()
        average(model.parameters())
        optimizer.step()


def meta_learning(_wrong):
    """A first step is taken inside of the loss, by functional calls."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        names = dict(model.named_parameters())
        losses = []
        for row, label in zip(inputs.split(4), labels.split(4), strict=True):
            first = cross_entropy(torch.func.functional_call(model, names, row[:2]), label[:2])
            slopes = torch.autograd.grad(first, list(names.values()), create_graph=True)
            moved = {
                name: value - 0.1 * slope
                for (name, value), slope in zip(names.items(), slopes, strict=True)
            }
            outputs = torch.func.functional_call(model, moved, row[2:])
            losses.append(cross_entropy(outputs, label[2:]))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        average(model.parameters())
        optimizer.step()


def several_losses(_wrong):
    """Three losses of one model with weights, and a term on its weights."""
    net = DistributedDataParallel(mlp(outputs=CLASSES + 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        outputs = net(inputs)
        decay = sum(parameter.square().sum() for parameter in net.parameters())
        loss = (
            0.5 * cross_entropy(outputs[:, :CLASSES], labels)
            + 0.3 * mse_loss(outputs[:, CLASSES], inputs[:, 0])
            + 0.2 * mse_loss(outputs[:, CLASSES + 1], inputs[:, 1])
            + 1e-3 * decay
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def new_optimiser(_wrong):
    """After three steps a layer is freed, and a new optimiser takes over."""
    model = Classifier()
    model.body.requires_grad_(False)
    net = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    for step, (inputs, labels) in enumerate(loader(table())):
        if step == 3:
            model.body.requires_grad_(True)
            net = DistributedDataParallel(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()


def reduced_mean(_wrong):
    """The loss is divided before the backward pass, and gradients are sums of all ranks."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        (cross_entropy(model(inputs), labels, reduction="sum") / BATCH).backward()
        handles = [
            dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()
        ]
        for handle in handles:
            handle.wait()
        optimizer.step()


class Repeated(Sampler):
    """Gives each row to several ranks in turn, as each will see another view of it."""

    def __init__(self, size, repeats=3):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(2))
        self.own = order.repeat_interleave(repeats)[rank() :: ranks()].tolist()

    def __iter__(self):
        return iter(self.own)

    def __len__(self):
        return len(self.own)


def repeated_augmentation(_wrong):
    """Ranks have views of the same rows."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    dataset = table()
    torch.manual_seed(60 + rank())
    for inputs, labels in DataLoader(dataset, batch_size=8, sampler=Repeated(len(dataset))):
        views = inputs * (1 + 0.1 * torch.randn_like(inputs))
        optimizer.zero_grad()
        cross_entropy(net(views), labels).backward()
        optimizer.step()


class Experts(nn.Module):
    """Each rank has an expert, to which all ranks send a part of their rows."""

    def __init__(self, width):
        super().__init__()
        self.expert = nn.Sequential(nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, width))

    def forward(self, rows):
        sent = Sent.apply(rows.view(ranks(), -1, rows.shape[1]))
        return rows + Sent.apply(self.expert(sent)).reshape(rows.shape)


class Sent(torch.autograd.Function):
    """Part r of the rows goes to rank r."""

    @staticmethod
    def forward(ctx, rows):
        found = torch.empty_like(rows)
        dist.all_to_all_single(found, rows.contiguous())
        return found

    @staticmethod
    def backward(ctx, gradient):
        found = torch.empty_like(gradient)
        dist.all_to_all_single(found, gradient.contiguous())
        return found


def experts(_wrong):
    """A mixture of experts, of which each rank has one; other weights are averaged."""
    first, last = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
    batches = loader(table())
    torch.manual_seed(80 + rank())
    middle = Experts(16)
    model = nn.Sequential(first, middle, last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for inputs, labels in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        average([*first.parameters(), *last.parameters()])
        for parameter in middle.parameters():
            parameter.grad /= ranks()
        optimizer.step()


def per_sample_gradients(_wrong):
    """The gradient of each row is clipped, as for differential privacy."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(weights, row, label):
        outputs = torch.func.functional_call(model, weights, row[None])
        return cross_entropy(outputs, label[None])

    gradients = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))
    for inputs, labels in loader(table()):
        weights = {name: each.detach() for name, each in model.named_parameters()}
        found = gradients(weights, inputs, labels)
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in found.values()]).norm(dim=0)
        factors = (1 / norms).clamp(max=1) / BATCH
        for name, parameter in model.named_parameters():
            parameter.grad = torch.einsum("n,n...->...", factors, found[name])
            dist.all_reduce(parameter.grad)
        optimizer.step()


def optimiser_in_backward(_wrong):
    """Each parameter has an optimiser, which steps as soon as its gradient is complete."""
    model = Classifier()
    own = {each: torch.optim.AdamW([each], lr=0.01) for each in model.parameters()}

    def step(parameter):
        average([parameter])
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for inputs, labels in loader(table()):
        cross_entropy(model(inputs), labels).backward()


def hardest_pairs(_wrong):
    """A loss of the hardest pairs among the rows of each rank."""
    net = DistributedDataParallel(mlp(outputs=8))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(90 + rank())
    classes = torch.arange(4).repeat_interleave(4)
    same = classes[:, None] == classes
    for _ in range(8):
        inputs = torch.randn(16, FEATURES, generator=generator) + classes[:, None]
        outputs = net(inputs)
        distances = torch.cdist(outputs, outputs)
        far = distances.masked_fill(~same, 0).amax(1)
        near = distances.masked_fill(same, 99).amin(1)
        optimizer.zero_grad()
        torch.relu(far - near + 0.5).mean().backward()
        optimizer.step()


def attack(_wrong):
    """Rows are moved along the sign of their gradient, by a pass whose other gradients are lost."""
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for inputs, labels in loader(table()):
        rows = inputs.clone().requires_grad_()
        cross_entropy(net(rows), labels).backward()
        optimizer.zero_grad()
        cross_entropy(net((rows + 0.05 * rows.grad.sign()).detach()), labels).backward()
        optimizer.step()


def tasks_of_ranks(_wrong):
    """Each rank draws the task of its batch; heads that it does not use have no gradient."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.heads = mlp(outputs=12), nn.ModuleList(nn.Linear(12, 4) for _ in "ab")

        def forward(self, inputs, task):
            return self.heads[task](torch.relu(self.body(inputs)))

    net = DistributedDataParallel(Shared(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(95 + rank())
    for step in range(8):
        inputs = torch.randn(8, FEATURES, generator=generator)
        task = (step // 2 + rank()) % 2
        outputs = net(inputs, task)
        loss = (mse_loss if task else l1_loss)(outputs, inputs[:, :4].sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    run(
        __doc__,
        *(own_sampler, frozen_layers, several_optimisers, average_of_weights, joined, recomputed),
        *(line_search, lists, token_budget, hooks, flat_gradient, divided_optimiser),
        *(global_norm, uneven_end, masked_words, contrastive, batch_per_rank, batch_norm),
        *(dropout, sharp_minima, joined_by_context, actor_critic, unused_parameters, autocast),
        *(recurrent, gradient_penalty, meta_learning, several_losses, new_optimiser),
        *(reduced_mean, repeated_augmentation, experts, per_sample_gradients),
        *(optimiser_in_backward, hardest_pairs, attack, tasks_of_ranks),
    )
