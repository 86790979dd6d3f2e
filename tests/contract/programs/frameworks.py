"""A training of a framework over "paceline", asked for as docs/reference/back-ends.md says.

usage: frameworks.py FRAMEWORK FOLDER     (as one of the ranks that torchrun starts)

Writes FOLDER/RANK.json: the type of the group, and the weights before and after the training.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

RATE = 0.1


def main() -> None:
    framework, folder = sys.argv[1], Path(sys.argv[2])
    rank = os.environ["RANK"]
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    before = weights_of(model)
    FRAMEWORKS[framework](model, folder)
    found = {
        "group": type(dist.group.WORLD).__name__,
        "before": before,
        "after": weights_of(model),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def weights_of(model: nn.Module) -> list[float]:
    return [value for each in model.parameters() for value in each.flatten().tolist()]


def samples() -> TensorDataset:
    return TensorDataset(torch.randn(32, 8), torch.randn(32, 2))


def accelerate(model: nn.Module, _folder: Path) -> None:
    from accelerate import Accelerator

    dist.init_process_group("paceline")
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), 4))
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward((wrapped(inputs) - targets).square().mean())
        optimizer.step()


def transformers(model: nn.Module, folder: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = model

        def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.linear(inputs) - targets).square().mean()}

    class Named(Dataset[dict[str, Tensor]]):
        def __init__(self) -> None:
            self.pairs = samples()

        def __len__(self) -> int:
            return len(self.pairs)

        def __getitem__(self, place: int) -> dict[str, Tensor]:
            inputs, targets = self.pairs[place]
            return {"inputs": inputs, "targets": targets}

    dist.init_process_group("paceline")
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, per_device_train_batch_size=4, num_train_epochs=1,
        learning_rate=RATE, optim="sgd", save_strategy="no", report_to=[],
    )  # fmt: skip
    Trainer(Regression(), arguments, train_dataset=Named()).train()


def lightning(model: nn.Module, folder: Path) -> None:
    from lightning import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Regression(LightningModule):  # type: ignore[misc]  # Any where it is not installed
        def __init__(self) -> None:
            super().__init__()
            self.linear = model

        def training_step(self, batch: list[Tensor], _place: int) -> Tensor:
            inputs, targets = batch
            return (self.linear(inputs) - targets).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), RATE)

    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="paceline"),
        max_epochs=1, logger=False, enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Regression(), DataLoader(samples(), 4))


FRAMEWORKS: dict[str, Callable[[nn.Module, Path], None]] = {
    "accelerate": accelerate,
    "transformers": transformers,
    "lightning": lightning,
}

if __name__ == "__main__":
    main()
