"""A plain training of two ranks that knows nothing of Paceline and notes when its steps ended.

    torchrun --nproc-per-node 2 verified_training.py alexnet --steps 12 --out FOLDER

FOLDER/RANKS.RANK.jsonl gets a line for each step: when it ended, and the rank's peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bare_ddp import alexnet, sgd

RANKS = 2
CLASSES, WORDS, LENGTH, WIDTH = 10, 4096, 64, 4096


class Transformer(nn.Module):
    """Predicts the next word; 7 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 256), nn.Embedding(LENGTH, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Return scores, shape (samples, WORDS, LENGTH), for words of shape (samples, LENGTH)."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        inputs = self.words(words) + self.places.weight
        scores: Tensor = self.head(self.layers(inputs, mask=mask, is_causal=True))
        return scores.transpose(1, 2)


def mlp() -> nn.Module:
    """Return a network of 50 million parameters."""
    layers = [each for _ in range(3) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _images(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 224, 224), torch.randint(CLASSES, (rows,))


def _sentences(rows: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(WORDS, (rows, LENGTH + 1))
    return words[:, :-1], words[:, 1:]


def _vectors(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.randint(CLASSES, (rows,))


@dataclass(frozen=True)
class Network:
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    rows: int  # of a rank in a step
    is_shared: bool = False  # ranks train on parts of what one process trains on, without dropout


NETWORKS = {
    "alexnet": Network(lambda: alexnet(CLASSES), sgd, _images, 32),
    "alexnet-shared": Network(lambda: alexnet(CLASSES), sgd, _images, 32, is_shared=True),
    "transformer": Network(Transformer, adam, _sentences, 16),
    "mlp": Network(mlp, sgd, _vectors, 64),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    network = NETWORKS[arguments.network]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = network.model()
    for module in model.modules():
        if isinstance(module, nn.Dropout) and network.is_shared:
            module.p = 0.0
    rank = 0
    if ranks > 1:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = network.optimizer(model)
    torch.manual_seed(100 + (0 if network.is_shared else rank))
    with (arguments.out / f"{ranks}.{rank}.jsonl").open("w") as notes:
        for _ in range(arguments.steps):
            inputs, targets = network.batch((RANKS if network.is_shared else 1) * network.rows)
            if network.is_shared:
                inputs, targets = (each.chunk(ranks)[rank] for each in (inputs, targets))
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            row = {"ended_unix_s": time.time(), "rss_peak_bytes": peak_bytes}
            notes.write(json.dumps(row) + "\n")
            notes.flush()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
