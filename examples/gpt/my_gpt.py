"""A small language model of your own: tokens, attention, tied weights, next-token accuracy."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import paceline


class Options(paceline.TaskOptions):
    """Keys of `options` in the spec."""

    vocabulary: int = 32
    length: int = 24  # tokens of a sample
    width: int = 32
    heads: int = 4
    blocks: int = 3


class Sequences:
    """Arithmetic sequences modulo the vocabulary; the first two tokens determine the others."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self._vocabulary, self._length = vocabulary, length

    def __len__(self) -> int:
        return 16 * self._vocabulary

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        step, start = divmod(index, self._vocabulary)
        tokens = (start + (step + 1) * np.arange(self._length + 1)) % self._vocabulary
        return tokens[:-1], tokens[1:]


class Block(nn.Module):
    """Causal attention and a feed-forward network, each with a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # Softmax ignores a bias of the keys: its gradient would be rounding errors only.
        self.attend, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, units: torch.Tensor) -> torch.Tensor:
        """Return units of the same shape, (samples, tokens, width)."""
        parts = self.attend(self.norm1(units)).chunk(3, dim=-1)
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        units = units + self.project(attended.transpose(1, 2).flatten(2))
        return units + self.down(gelu(self.up(self.norm2(units))))


class Network(nn.Module):
    """A model that is no sequence: pipelines find by themselves where to split it."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.token = nn.Embedding(options.vocabulary, options.width)
        self.position = nn.Parameter(0.02 * torch.randn(options.length, options.width))
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(
            Block(options.width, options.heads) for _ in range(options.blocks)
        )
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, options.vocabulary, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores of the next tokens, shape (samples, tokens, vocabulary)."""
        units = self.dropout(self.token(tokens) + self.position)
        for block in self.blocks:
            units = block(units)
        return self.head(self.norm(units))


class GPT(paceline.Task):
    """Predict the next token of each position."""

    Options = Options
    clip_norm = 1.0

    def dataset(self) -> Sequences:
        """Return the samples: (tokens, next tokens)."""
        return Sequences(self.options.vocabulary, self.options.length)

    def model(self) -> nn.Module:
        """Return the network with its initial weights."""
        return Network(self.options)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of each sample's tokens."""
        return cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)

    def evaluate(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> dict[str, torch.Tensor | paceline.Sums]:
        """Return the loss, and the share of tokens that are predicted."""
        right = (outputs.argmax(-1) == targets).double().mean(1)
        return {"loss": self.loss(outputs, targets), "accuracy": right}

    def optimizer(self, parameters: paceline.NamedParameters) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(parameters, lr=self.settings.learning_rate)
