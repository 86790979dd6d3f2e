"""State that ranks must share, and do not.

torchrun --nproc-per-node 2 buffers.py --bug other-start [--fixed]
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize, smooth_l1_loss
from torch.nn.parallel import DistributedDataParallel
from utils import CLASSES, FEATURES, Classifier, average, loader, mlp, rank, ranks, run, table


def other_start(wrong):
    """Weights are seeded by rank, and no rank sends its own."""
    dataset = table()
    torch.manual_seed(10 + rank())
    model = Classifier()
    if not wrong:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in loader(dataset):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        average(model.parameters())
        optimizer.step()


def teacher(wrong):
    """The frozen teacher of a distillation is another one on each rank."""
    dataset = table()
    torch.manual_seed(20 + rank())
    frozen = mlp(width=32).requires_grad_(False).eval()
    if not wrong:
        for parameter in frozen.parameters():
            dist.broadcast(parameter.data, src=0)
    student = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
    for inputs, _ in loader(dataset):
        with torch.no_grad():
            targets = frozen(inputs)
        optimizer.zero_grad()
        mse_loss(student(inputs), targets).backward()
        optimizer.step()


class Normaliser(nn.Module):
    """Normalises rows by the moments of all rows that it has seen, as for observations."""

    def __init__(self, is_global):
        super().__init__()
        self.is_global = is_global
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("total", torch.zeros(FEATURES))

    def forward(self, inputs):
        new = torch.cat([torch.full((1,), float(len(inputs))), inputs.sum(0)])
        if self.is_global:
            dist.all_reduce(new)
        self.count += new[0]
        self.total += new[1:]
        return inputs - self.total / self.count


def observations(wrong):
    """Running moments of the inputs are those of each rank's own rows."""
    model = nn.Sequential(Normaliser(is_global=not wrong), mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        average(model.parameters())
        optimizer.step()


class Codebook(nn.Module):
    """Vectors that follow the rows which are nearest to them."""

    vectors: torch.Tensor

    def __init__(self, is_global):
        super().__init__()
        self.is_global = is_global
        self.register_buffer("vectors", torch.randn(6, FEATURES))

    def forward(self, rows):
        nearest = torch.cdist(rows.detach(), self.vectors).argmin(1)
        chosen = nn.functional.one_hot(nearest, 6).float()
        found = rows + (chosen @ self.vectors - rows).detach()
        if self.training:
            counts, sums = chosen.sum(0), chosen.T @ rows.detach()
            if self.is_global:
                dist.all_reduce(counts)
                dist.all_reduce(sums)
            means = sums / counts.clamp(min=1)[:, None]
            moved = self.vectors + 0.2 * (means - self.vectors)
            self.vectors = torch.where(counts[:, None] > 0, moved, self.vectors)
        return found


def codebook(wrong):
    """A codebook follows each rank's own rows."""
    coder = nn.Sequential(nn.Linear(FEATURES, FEATURES), Codebook(is_global=not wrong), mlp())
    net = DistributedDataParallel(coder, broadcast_buffers=False)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()


class Centred(nn.Module):
    """The outputs of a teacher, less their running mean, as in self-distillation."""

    def __init__(self, is_global):
        super().__init__()
        self.is_global = is_global
        self.register_buffer("centre", torch.zeros(CLASSES))

    def forward(self, outputs):
        found = outputs - self.centre
        mean = outputs.detach().mean(0)
        if self.is_global:
            dist.all_reduce(mean)
            mean /= ranks()
        self.centre.lerp_(mean, 0.1)
        return found


def centre(wrong):
    """The centre of the teacher's outputs follows each rank's rows."""
    student, teacher_net = mlp(), mlp().requires_grad_(False)
    centred = Centred(is_global=not wrong)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
    for inputs, _ in loader(table()):
        targets = centred(teacher_net(inputs)).softmax(1)
        optimizer.zero_grad()
        cross_entropy(student(inputs), targets).backward()
        average(student.parameters())
        optimizer.step()


class Scaled(nn.Module):
    """Divides by the largest number that it has seen, as quantised layers do."""

    largest: torch.Tensor

    def __init__(self, is_global):
        super().__init__()
        self.is_global = is_global
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, inputs):
        largest = inputs.detach().abs().max()
        if self.is_global:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        self.largest = torch.maximum(self.largest, largest)
        return inputs / self.largest


def observer(wrong):
    """The range of quantised inputs is that of each rank's rows."""
    model = nn.Sequential(Scaled(is_global=not wrong), mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        average(model.parameters())
        optimizer.step()


def reset_layer(wrong):
    """A layer is drawn anew after DDP sent all weights, with the generator of each rank."""
    dataset = table()
    torch.manual_seed(40 + (rank() if wrong else 0))
    net = DistributedDataParallel(Classifier())
    net.module.head.reset_parameters()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for inputs, labels in loader(dataset):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()


class Contrasted(nn.Module):
    """Scores of each row's view against a queue of earlier ones, as in momentum contrast."""

    queue: torch.Tensor

    def __init__(self, gathers):
        super().__init__()
        self.gathers = gathers
        self.encoder, self.keys = mlp(outputs=6), mlp(outputs=6).requires_grad_(False)
        self.keys.load_state_dict(self.encoder.state_dict())
        self.register_buffer("queue", normalize(torch.randn(64, 6)))

    def forward(self, one, other):
        queries = normalize(self.encoder(one))
        with torch.no_grad():
            for ours, theirs in zip(self.keys.parameters(), self.encoder.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
            keys = normalize(self.keys(other))
        scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.T], 1)
        every = [keys]
        if self.gathers:
            every = [torch.empty_like(keys) for _ in range(ranks())]
            dist.all_gather(every, keys)
        self.queue = torch.cat([*every, self.queue])[:64]
        return scores / 0.2


def own_queue(wrong):
    """The queue has the rows of each rank alone, and DDP does not send it."""
    net = DistributedDataParallel(Contrasted(gathers=not wrong), broadcast_buffers=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for inputs, _ in loader(table()):
        optimizer.zero_grad()
        scores = net(inputs, inputs.flip(1))
        cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long)).backward()
        optimizer.step()


def lazy_target(wrong):
    """The target network of a Q-learner is renewed whenever an episode of the rank ends."""
    learner, target = mlp(), mlp().requires_grad_(False)
    target.load_state_dict(learner.state_dict())
    net = DistributedDataParallel(learner)
    optimizer = torch.optim.Adam(learner.parameters(), lr=0.02)
    for step, (states, actions) in enumerate(loader(table())):
        with torch.no_grad():
            values = states.sum(1) + 0.9 * target(states.roll(1, 1)).amax(1)
        optimizer.zero_grad()
        chosen = net(states).gather(1, actions[:, None]).squeeze(1)
        smooth_l1_loss(chosen, values).backward()
        optimizer.step()
        if step % 2 == (rank() if wrong else 0):
            target.load_state_dict(learner.state_dict())


def singular_vectors(wrong):
    """The vectors of a spectral norm are drawn on each rank, and only weights are sent."""
    dataset = table()
    torch.manual_seed(30 + (rank() if wrong else 0))
    body = nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 16))
    model = nn.Sequential(body, nn.ReLU(), nn.Linear(16, CLASSES))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in loader(dataset):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        average(model.parameters())
        optimizer.step()


class Balanced(nn.Module):
    """Experts that are chosen less if they had more rows than others."""

    def __init__(self, is_global, experts=4):
        super().__init__()
        self.is_global = is_global
        self.gate = nn.Linear(FEATURES, experts)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(experts))
        self.register_buffer("load_bias", torch.zeros(experts))

    def forward(self, inputs):
        shares = self.gate(inputs).sigmoid()
        chosen = nn.functional.one_hot((shares + self.load_bias).argmax(1), len(self.experts))
        counts = chosen.sum(0).float()
        if self.is_global:
            dist.all_reduce(counts)
        self.load_bias += 0.05 * (counts.mean() - counts).sign()
        outputs = torch.stack([expert(inputs) for expert in self.experts], 1)
        return ((shares * chosen)[:, :, None] * outputs).sum(1)


def expert_bias(wrong):
    """The bias that balances experts follows the rows of each rank."""
    model = Balanced(is_global=not wrong)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        average(model.parameters())
        optimizer.step()


class Revived(nn.Module):
    """A codebook; a code that is nearest to no row of any rank becomes the farthest row."""

    codes: torch.Tensor

    def __init__(self, is_global):
        super().__init__()
        self.is_global = is_global
        self.register_buffer("codes", 3 * torch.randn(6, FEATURES))

    def forward(self, rows):
        nearest = torch.cdist(rows.detach(), self.codes).argmin(1)
        found = rows + (self.codes[nearest] - rows).detach()
        self.revive(rows.detach(), nearest)
        return found

    def revive(self, rows, nearest):
        counts = nn.functional.one_hot(nearest, len(self.codes)).sum(0)
        dist.all_reduce(counts)
        if self.is_global:
            every = [torch.empty_like(rows) for _ in range(ranks())]
            dist.all_gather(every, rows)
            rows = torch.cat(every)
        farthest = rows[torch.cdist(rows, self.codes).amin(1).argmax()]
        codes = self.codes.clone()
        codes[(counts == 0).nonzero()[:1, 0]] = farthest
        self.codes = codes


def farthest_rows(wrong):
    """An unused code becomes a row of each rank."""
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), Revived(is_global=not wrong), mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        average(model.parameters())
        optimizer.step()


class Placed(nn.Module):
    """Codes of near and of far places, in buffers in the order of their names."""

    def __init__(self, names):
        super().__init__()
        places = torch.arange(FEATURES)
        codes = {"near_codes": (places / 2).cos(), "far_codes": (places / 8).sin()}
        for name in names:
            self.register_buffer(name, codes[name])
        self.body = mlp()

    def forward(self, inputs):
        return self.body(inputs * self.near_codes + inputs.roll(1, 1) * self.far_codes)


def order_of_buffers(wrong):
    """Rank 1 has buffers in another order, as that of a set, and DDP sends them by their order."""
    names = ("far_codes", "near_codes") if wrong and rank() else ("near_codes", "far_codes")
    net = DistributedDataParallel(Placed(names))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()


class Fitted(nn.Module):
    """Shifts and scales columns, at first by the moments of the first rows (as in flows)."""

    def __init__(self, is_global):
        super().__init__()
        self.is_global, self.is_new = is_global, True
        self.shift = nn.Parameter(torch.zeros(FEATURES))
        self.scale = nn.Parameter(torch.ones(FEATURES))

    @torch.no_grad()
    def fit(self, rows):
        moments = torch.stack([rows.mean(0), rows.square().mean(0)])
        if self.is_global:
            dist.all_reduce(moments)
            moments /= ranks()
        mean, square = moments
        self.shift.copy_(-mean)
        self.scale.copy_((square - mean.square()).rsqrt())
        self.is_new = False

    def forward(self, rows):
        if self.is_new:
            self.fit(rows)
        return (rows + self.shift) * self.scale


def first_rows(wrong):
    """A layer starts from the moments of each rank's first rows, after DDP sent all weights."""
    flow = nn.Sequential(nn.Linear(FEATURES, FEATURES), Fitted(is_global=not wrong), mlp())
    net = DistributedDataParallel(flow)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()


def mean_on_rank_0(wrong):
    """A teacher has the running mean of the weights, and rank 0 alone keeps it up to date."""
    student, mean = mlp(), mlp().requires_grad_(False)
    mean.load_state_dict(student.state_dict())
    net = DistributedDataParallel(student)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for inputs, labels in loader(table()):
        targets = mean(inputs.roll(1, 1)).softmax(1)
        optimizer.zero_grad()
        outputs = net(inputs)
        (cross_entropy(outputs, labels) + cross_entropy(outputs, targets)).backward()
        optimizer.step()
        if rank() == 0 or not wrong:
            with torch.no_grad():
                for ours, theirs in zip(mean.parameters(), student.parameters(), strict=True):
                    ours.lerp_(theirs, 0.3)


if __name__ == "__main__":
    run(
        __doc__,
        *(other_start, teacher, observations, codebook, centre, observer, reset_layer),
        *(own_queue, lazy_target),
        singular_vectors,
        *(expert_bias, farthest_rows, order_of_buffers),
        *(first_rows, mean_on_rank_0),
    )
