"""A language model in the shape of GPT-2 (Radford et al., 2019), with tied weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from paceline.base.errors import DataError
from paceline.train.training.task import NamedParameters, Sums
from paceline.train.workloads.build import BuiltInOptions, BuiltInTask

Tokens = NDArray[np.int64]


class GptOptions(BuiltInOptions):
    """GPT-2 small has 50257, 1024, 768, 12 and 12."""

    vocabulary: int = 256
    length: int = 64  # tokens of an input
    width: int = 128
    heads: int = 4
    blocks: int = 4
    dropout: float = 0.1
    tokens: str | None = None  # .npy file with a vector of integers, in place of synthetic tokens


class Sequences:
    """Arithmetic sequences modulo the vocabulary; the first two tokens determine the others."""

    def __init__(self, samples: int, vocabulary: int, length: int) -> None:
        self._samples, self._vocabulary, self._length = samples, vocabulary, length

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tokens, Tokens]:
        """Return the tokens twice: the task takes all but the last, or all but the first."""
        start, step = divmod(index, 16)
        tokens = (start + (step + 1) * np.arange(self._length + 1)) % self._vocabulary
        return tokens, tokens


class TokenFile:
    """Consecutive parts of a file of tokens, which share one token."""

    def __init__(self, path: str, vocabulary: int, length: int) -> None:
        """Raises DataError if the file is no vector of tokens below `vocabulary`."""
        try:
            self._tokens = np.load(Path(path), mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: expected a .npy file of tokens, got: {error}") from None
        if self._tokens.ndim != 1 or self._tokens.dtype.kind not in "iu":
            raise DataError(
                f"{path}: expected a vector of integers, got {self._tokens.dtype} of shape "
                f"{self._tokens.shape}"
            )
        self._length = length
        if not len(self):
            raise DataError(f"{path}: expected at least {length + 1} tokens")
        low, high = int(self._tokens.min()), int(self._tokens.max())
        if low < 0 or high >= vocabulary:
            raise DataError(
                f"{path}: expected tokens from 0 to {vocabulary - 1}, got {low} to {high}"
            )

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[Tokens, Tokens]:
        first = index * self._length
        tokens = np.asarray(self._tokens[first : first + self._length + 1], dtype=np.int64)
        return tokens, tokens


class GPT(BuiltInTask):
    """Predict the next token of each position. A data set has one field with length + 1 tokens."""

    Options = GptOptions
    input_field = target_field = "tokens"
    clip_norm = 1.0

    def dataset(self) -> Sequences | TokenFile:
        options = self.options
        if options.tokens is not None:
            return TokenFile(options.tokens, options.vocabulary, options.length)
        return Sequences(self.settings.samples, options.vocabulary, options.length)

    def model(self) -> nn.Module:
        return _Network(self.options)

    def to_input(self, samples: Tokens) -> Tensor:
        return super().to_input(samples[:, :-1])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of each sample's tokens."""
        return cross_entropy(outputs.transpose(1, 2), targets[:, 1:], reduction="none").mean(1)

    def evaluate(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor | Sums]:
        """Return the loss, and the share of tokens that are predicted."""
        right = (outputs.argmax(-1) == targets[:, 1:]).double().mean(1)
        return {"loss": self.loss(outputs, targets), "accuracy": right}

    def optimizer(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.settings.learning_rate)


class _Block(nn.Module):
    """Causal attention and a feed-forward network, each with a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # Softmax ignores a bias of the keys: its gradient would be rounding errors only.
        self.attend, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, units: Tensor) -> Tensor:
        """Return units of the same shape, (samples, tokens, width)."""
        parts = self.attend(self.norm1(units)).chunk(3, dim=-1)
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        units = units + self.project(attended.transpose(1, 2).flatten(2))
        joined: Tensor = units + self.down(gelu(self.up(self.norm2(units))))
        return joined


class _Network(nn.Module):
    """A model that is no sequence: pipelines find by themselves where to split it."""

    def __init__(self, options: GptOptions) -> None:
        super().__init__()
        self.token = nn.Embedding(options.vocabulary, options.width)
        self.position = nn.Parameter(0.02 * torch.randn(options.length, options.width))
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(
            _Block(options.width, options.heads) for _ in range(options.blocks)
        )
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, options.vocabulary, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of the next tokens, shape (samples, tokens, vocabulary)."""
        units = self.dropout(self.token(tokens) + self.position)
        for block in self.blocks:
            units = block(units)
        scores: Tensor = self.head(self.norm(units))
        return scores
