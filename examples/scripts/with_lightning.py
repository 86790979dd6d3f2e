"""A small classifier with Lightning.

torchrun --nproc-per-node 2 with_lightning.py
"""

import argparse
import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024),
                                    nn.ReLU(), nn.Linear(1024, 2))  # fmt: skip

    def training_step(self, batch, _):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="samples of all ranks in one step")
    arguments = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))

    lightning.seed_everything(0)
    inputs = torch.randn(2048, 64)
    data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp",
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=arguments.batch // ranks, shuffle=True))


if __name__ == "__main__":
    main()
