"""The same training in every layout of `distribute.py`, chosen by an option.

    torchrun --nproc-per-node 2 layouts.py --layout fsdp
    paceline verify --vary=--layout=ddp,fsdp,tp,pipeline,ddp+compile layouts.py
    paceline run --vary=--layout=ddp,fsdp,tp,pipeline layouts.py

The global batch is fixed: each rank takes its share of it, or with `tp` and `pipeline` the whole.
"""

import argparse
import os

import torch
import torch.distributed as dist
from distribute import distribute, forward_backward
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Network(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="ddp")
    parser.add_argument("--batch", type=int, default=32, help="samples of all ranks in one step")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=3)
    options = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")

    torch.manual_seed(1)
    inputs = torch.randn(options.steps * options.batch, WIDTH)
    labels = torch.randint(0, 10, (len(inputs),))
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    model = distribute(
        Network(options.blocks), options.layout, plan=plan, example=inputs[: options.batch]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)

    parts = 1 if options.layout.startswith(("tp", "pipeline")) else ranks
    own = range(rank % parts, len(inputs), parts)
    data = TensorDataset(inputs[own.start :: parts], labels[own.start :: parts])
    for samples, targets in DataLoader(data, batch_size=options.batch // parts):
        optimizer.zero_grad()
        forward_backward(model, samples, targets, nn.functional.cross_entropy)
        optimizer.step()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
