"""A small classifier with Hugging Face Accelerate.

    torchrun --nproc-per-node 2 with_accelerate.py

Accelerate's data loader shares the batches of one sampler among the ranks.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="samples of all ranks in one step")
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(0)
    inputs = torch.randn(2048, 64)
    data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
                          nn.Linear(1024, 2))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=arguments.batch // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(arguments.epochs):
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), labels)
            accelerator.backward(loss)
            optimizer.step()
        mean = accelerator.gather(loss.detach()).mean().item()
        accelerator.print(f"epoch {epoch}: loss {mean:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
