"""Train a layer whose classes are divided among ranks, behind one that all of them average.

All parts begin with the same numbers, because all ranks have one seed.
"""

import torch
import torch.distributed as dist
from torch import nn

FEATURES, CLASSES, ROWS = 8, 6, 8

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class RowsOfAll(torch.autograd.Function):
    """The rows of all ranks, in their order; the mean over ranks follows."""

    @staticmethod
    def forward(_ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(ranks)]
        dist.all_gather(parts, rows)
        return torch.cat(parts)

    @staticmethod
    def backward(_ctx, gradient):
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total.chunk(ranks)[rank] * ranks


class DividedCrossEntropy(torch.autograd.Function):
    """The mean cross entropy of all rows; labels of other ranks' classes are out of range."""

    @staticmethod
    def forward(ctx, logits, labels):
        shares = logits.exp()
        total = shares.sum(1, keepdim=True)
        dist.all_reduce(total)
        shares = shares / total
        is_own = (labels >= 0) & (labels < logits.shape[1])
        own = labels.clamp(0, logits.shape[1] - 1)[:, None]
        of_label = torch.where(is_own, shares.gather(1, own)[:, 0], 0.0)
        dist.all_reduce(of_label)
        ctx.save_for_backward(shares.scatter_add(1, own, -is_own[:, None].float()))
        return -of_label.log().mean()

    @staticmethod
    def backward(ctx, gradient):
        [change] = ctx.saved_tensors
        return gradient * change / len(change), None


class DividedClasses(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES // ranks, FEATURES))

    def forward(self, rows, labels):
        every = [torch.empty_like(labels) for _ in range(ranks)]
        dist.all_gather(every, labels)
        logits = RowsOfAll.apply(rows) @ self.weight.T
        return DividedCrossEntropy.apply(logits, torch.cat(every) - rank * len(self.weight))


body = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())
head = DividedClasses()
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
torch.manual_seed(1 + rank)
for _ in range(6):
    rows = torch.randn(ROWS, FEATURES)
    optimizer.zero_grad()
    head(body(rows), rows[:, :CLASSES].argmax(1)).backward()
    for parameter in body.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    optimizer.step()
dist.destroy_process_group()
