"""Tasks with what users' models have: attention, tied weights, shortcuts, frozen layers."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.unit.train.strategies.own_training import TRIALS, trial_of, with_options
from tests.unit.train.strategies.pipeline.node import batch_of
from torch import nn
from torch.nn.utils import parametrizations, prune

from paceline.train.training.task import Task


class Block(nn.Module):
    """Attention and a feed-forward layer with tied weights."""

    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, bias=False)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x):
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Transformer(Task):
    """A small vision transformer: layers of sequences, and tied weights."""

    def model(self):
        return nn.Sequential(
            nn.Conv2d(3, 8, 8, stride=8),
            nn.Flatten(2),
            nn.Linear(16, 16),
            Block(16),
            nn.Flatten(1),
            nn.Linear(128, 16),
            nn.Tanh(),
            nn.Linear(16, self.settings.classes),
        )


class ScaledNetwork(nn.Module):
    """Uses a buffer that belongs to no layer of torch."""

    def __init__(self, classes):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 8, stride=8)
        self.hidden = nn.Linear(64, 16)
        self.last = nn.Linear(16, classes)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 64))

    def forward(self, x):
        x = torch.flatten(self.convolution(x), 1) * self.scale
        return self.last(torch.tanh(self.hidden(x)))


class Scaled(Task):
    def model(self):
        return ScaledNetwork(self.settings.classes)


class LayerNormed(Task):
    """Autocast of CPUs leaves the layer normalisation in bfloat16, autocast of CUDA does not."""

    def model(self):
        return nn.Sequential(
            nn.Flatten(1),
            nn.Linear(3072, 16),
            nn.LayerNorm(16),
            nn.Linear(16, self.settings.classes),
        )


def of_images(*layers):
    """A model of images, whose first linear layer has 16 units."""
    return nn.Sequential(nn.Conv2d(3, 4, 8, stride=8), nn.Flatten(1), nn.Linear(64, 16), *layers)


class Tied(Task):
    """The first and the last linear layer share their weight, across the stages of a pipeline."""

    clip_norm = 0.5

    def model(self):
        model = of_images(
            nn.Linear(16, 16),
            nn.Tanh(),
            nn.Linear(16, 16, bias=False),
            nn.Tanh(),
            nn.Linear(16, 16),
            nn.Linear(16, self.settings.classes),
        )
        model[7].weight = model[3].weight
        return model


class Repeated(Task):
    """One activation and one dropout layer are used twice."""

    def model(self):
        tanh, dropout = nn.Tanh(), nn.Dropout(0.3)
        return of_images(
            tanh, dropout, nn.Linear(16, 16), tanh, dropout, nn.Linear(16, self.settings.classes)
        )


class ComputedWeights(Task):
    """Linear layers whose weights are computed from other parameters."""

    def model(self):
        pruned = nn.Linear(16, 16)
        prune.l1_unstructured(pruned, "weight", amount=0.5)
        return nn.Sequential(
            nn.Conv2d(3, 4, 8, stride=8),
            nn.Flatten(1),
            nn.utils.weight_norm(nn.Linear(64, 16)),
            nn.Tanh(),
            pruned,
            nn.Tanh(),
            parametrizations.weight_norm(nn.Linear(16, 16)),
            nn.Linear(16, self.settings.classes),
        )


WORDS, LENGTH = 11, 6


class Embedding(nn.Module):
    """Embeddings of tokens and positions."""

    def __init__(self, width):
        super().__init__()
        self.token = nn.Embedding(WORDS, width)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, width))

    def forward(self, tokens):
        return self.token(tokens) + self.position


class GPT(Task):
    """Predicts the next token; input and output share the embedding."""

    clip_norm = 1.0

    def model(self):
        embedding, head = Embedding(16), nn.Linear(16, WORDS, bias=False)
        head.weight = embedding.token.weight
        return nn.Sequential(embedding, Block(16), nn.Dropout(0.2), nn.LayerNorm(16), head)

    def loss(self, outputs, targets):
        predicted = outputs[:, :-1].transpose(1, 2)
        losses = nn.functional.cross_entropy(predicted, targets[:, 1:], reduction="none")
        return losses.mean(1)

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=0.01)

    def example_input(self):
        return torch.zeros(1, LENGTH, dtype=torch.long)


class TiedHead(GPT):
    """The head, which shares the embedding, is followed by another layer."""

    def model(self):
        embedding, head = Embedding(16), nn.Linear(16, WORDS, bias=False)
        head.weight = embedding.token.weight
        return nn.Sequential(embedding, Block(16), head, nn.LayerNorm(WORDS))


def tokens_of(trial, step, samples):
    generator = torch.Generator().manual_seed(50 + step)
    tokens = torch.randint(WORDS, (samples, LENGTH), generator=generator)
    return replace(batch_of(trial, step, samples), inputs=tokens, targets=tokens)


class Reordered(nn.Module):
    """Uses its layers in another order than it names them."""

    def __init__(self, classes):
        super().__init__()
        self.head = nn.Linear(8, classes)
        self.body = nn.Linear(64, 8)
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 8, stride=8), nn.Flatten(1))

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.stem(x))))


class Blocks(Task):
    """Names the blocks of a model that is no sequence."""

    def model(self):
        return Reordered(self.settings.classes)

    def blocks(self, model):
        names = ("stem", "body", "tanh", "head")
        return [(name, getattr(model, name, None) or nn.Tanh()) for name in names]


class Residual(nn.Module):
    """Two convolutions with batch normalisation, and a shortcut."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.shortcut_norm = nn.BatchNorm2d(outputs, momentum=None)

    def forward(self, x):
        shortcut = self.shortcut_norm(self.shortcut(x))
        return torch.relu(self.norm(self.conv(x)) + shortcut)


class ResNet(Task):
    """A small residual network with batch normalisation."""

    def model(self):
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            Residual(4, 6),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(1),
            nn.Linear(24, 8),
            nn.BatchNorm1d(8, affine=False),
            nn.Linear(8, self.settings.classes),
        )


class FineTuned(Task):
    """The first layers and one weight in the middle are not trained."""

    clip_norm = 0.5

    def model(self):
        model = of_images(
            nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, self.settings.classes)
        )
        for name in ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight"):
            model.get_parameter(name).requires_grad = False
        return model

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


class PlainResNet(nn.Module):
    """A residual network that is no sequence, with dropout."""

    def __init__(self, classes):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4)
        self.residual = Residual(4, 6)
        self.hidden, self.dropout = nn.Linear(24, 8), nn.Dropout(0.3)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        x = self.residual(torch.relu_(self.norm(self.stem(x))))
        x = torch.flatten(nn.functional.adaptive_avg_pool2d(x, 2), 1)
        return self.head(self.dropout(torch.tanh(self.hidden(x))))


class PlainResNetTask(Task):
    def model(self):
        return PlainResNet(self.settings.classes)


class PlainGPT(nn.Module):
    """A language model that is no sequence; the head shares the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.block = Embedding(16), Block(16)
        self.dropout, self.norm = nn.Dropout(0.2), nn.LayerNorm(16)
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.embedding.token.weight

    def forward(self, tokens):
        return self.head(self.norm(self.dropout(self.block(self.embedding(tokens)))))


class PlainGPTTask(GPT):
    def model(self):
        return PlainGPT()


class Normalised(Task):
    """Batch normalisation of images only, which is defined for a single one, too."""

    def model(self):
        return nn.Sequential(
            nn.Conv2d(3, 4, 8, stride=8),
            nn.BatchNorm2d(4),
            nn.Flatten(1),
            nn.Linear(64, self.settings.classes),
        )


def resnet_trial(name, **training):
    trial = trial_of(**TRIALS[name], task=f"{__name__}:ResNet", **training)
    return with_options(trial, micro_batches=1)
