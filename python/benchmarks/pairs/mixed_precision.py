"""Loss scales, master weights and exchanges in two precisions.

torchrun --nproc-per-node 2 mixed_precision.py --bug own-overflow [--fixed]
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from utils import Classifier, average, loader, mlp, rank, ranks, run, table


def own_overflow(wrong):
    """A rank that sees an overflow leaves out the step, the others do not."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dataset, scale = table(128), 2.0**12
    dataset.tensors[0][33:47:2] *= 1e4  # in the third step, of rank 1
    for inputs, labels in loader(dataset, shuffle=False):
        optimizer.zero_grad()
        (cross_entropy(model(inputs), labels) * scale).backward()
        largest = max(parameter.grad.abs().max() for parameter in model.parameters())
        overflows = (largest > 65504).float()
        if not wrong:
            dist.all_reduce(overflows, op=dist.ReduceOp.MAX)
        average(model.parameters())
        if overflows:
            scale /= 2
            continue
        for parameter in model.parameters():
            parameter.grad /= scale
        optimizer.step()


def scale_of_rank(wrong):
    """Scaled gradients are averaged, and each rank divides by a scale of its own."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scale = 2.0 ** (12 - (rank() if wrong else 0))
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        (cross_entropy(model(inputs), labels) * scale).backward()
        average(model.parameters())
        for parameter in model.parameters():
            parameter.grad /= scale
        optimizer.step()


def old_master(wrong):
    """Master weights are copied before rank 0 sends its weights."""
    dataset = table()
    torch.manual_seed(5 + rank())
    model = mlp().bfloat16()
    masters = [parameter.detach().float().clone() for parameter in model.parameters()]
    net = DistributedDataParallel(model)
    if not wrong:
        masters = [parameter.detach().float().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.05)
    for inputs, labels in loader(dataset):
        net.zero_grad()
        cross_entropy(net(inputs.bfloat16()).float(), labels).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.data.copy_(master)


def one_precision(wrong):
    """Buckets of one precision are exchanged, and the other one is forgotten."""
    model = nn.Sequential(mlp(outputs=8), nn.LayerNorm(8), nn.Linear(8, 4))
    model[0].bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kinds = (torch.float32,) if wrong else (torch.float32, torch.bfloat16)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        hidden = model[0](inputs.bfloat16()).float()
        cross_entropy(model[2](model[1](hidden)), labels).backward()
        for kind in kinds:
            gradients = [p.grad for p in model.parameters() if p.dtype == kind]
            bucket = torch.cat([gradient.flatten() for gradient in gradients]).float()
            dist.all_reduce(bucket)
            bucket /= ranks()
            sizes = [gradient.numel() for gradient in gradients]
            for gradient, part in zip(gradients, bucket.split(sizes), strict=True):
                gradient.copy_(part.view_as(gradient))
        optimizer.step()


def scaler_of_rank(wrong):
    """A gradient scaler of each rank begins with a scale of its own."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + (2 * rank() if wrong else 0)))
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(inputs), labels)).backward()
        average(model.parameters())
        scaler.step(optimizer)
        scaler.update()


def clipped_scaled(wrong):
    """Scaled gradients of each rank are clipped before the exchange, in place of unscaled ones."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scale = 2.0**10
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        (cross_entropy(model(inputs), labels) * scale).backward()
        if wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        average(model.parameters())
        for parameter in model.parameters():
            parameter.grad /= scale
        if not wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def low_mean(wrong):
    """Rank 1 rounds its weights to bf16 after each step, rank 0 does not."""
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = net(inputs)
        cross_entropy(outputs.float(), labels).backward()
        optimizer.step()
        if wrong and rank() == 1:
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.copy_(parameter.bfloat16())


def overflow_of_owner(wrong):
    """A rank leaves out a step of the parameters that it owns, if these have an overflow."""
    model = mlp()
    owned = list(model.parameters())[rank() :: ranks()]
    optimizer = torch.optim.SGD(owned, lr=0.05)
    dataset, scale = table(128), 2.0**12
    dataset.tensors[0][33:47:2] *= 1e4  # in the third step; gradients of biases remain small
    for inputs, labels in loader(dataset, shuffle=False):
        model.zero_grad()
        (cross_entropy(model(inputs), labels) * scale).backward()
        average(model.parameters())
        overflows = torch.stack([each.grad.abs().max() for each in owned]).max() > 65504
        overflows = overflows.float()
        if not wrong:
            dist.all_reduce(overflows, op=dist.ReduceOp.MAX)
        for parameter in owned:
            parameter.grad /= scale
        if not overflows:
            optimizer.step()
        for number, parameter in enumerate(model.parameters()):
            dist.broadcast(parameter.data, src=number % ranks())


def rounded_by_chance(wrong):
    """Weights are rounded to bf16 by chance, up or down, with a generator of each rank."""
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    chance = torch.Generator().manual_seed(5 + (rank() if wrong else 0))
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        for parameter in net.parameters():
            bits = parameter.detach().view(torch.int32)
            bits += torch.randint(0, 1 << 16, bits.shape, generator=chance, dtype=torch.int32)
            bits &= -(1 << 16)


def scale_of_codes(wrong):
    """Gradients are sent as whole numbers, and their sum is read with the scale of each rank."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in loader(table()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            scale = parameter.grad.abs().max() / 2**22
            if not wrong:
                dist.all_reduce(scale, op=dist.ReduceOp.MAX)
            codes = (parameter.grad / scale).round().int()
            dist.all_reduce(codes)
            parameter.grad.copy_(codes * scale / ranks())
        optimizer.step()


if __name__ == "__main__":
    run(
        __doc__,
        own_overflow,
        scale_of_rank,
        old_master,
        one_precision,
        scaler_of_rank,
        clipped_scaled,
        low_mean,
        *(overflow_of_owner, rounded_by_chance),
        *(scale_of_codes,),
    )
