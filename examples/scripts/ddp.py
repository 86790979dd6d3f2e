"""A small classifier under DistributedDataParallel, in the style of PyTorch's tutorial.

    torchrun --nproc-per-node 2 ddp.py --epochs 2

The global batch is fixed: each rank takes its share of it.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="samples of all ranks in one step")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_data(samples):
    inputs = torch.randn(samples, 64)
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


def make_model(width):
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
    )


def main():
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(arguments.seed)
    data = make_data(arguments.samples)
    model = DistributedDataParallel(make_model(arguments.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(data, num_replicas=ranks, rank=rank, seed=arguments.seed)
    loader = DataLoader(data, batch_size=arguments.batch // ranks, sampler=sampler)

    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
