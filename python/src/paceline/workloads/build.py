"""The models by name, as published, adapted to the number of classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.errors import UsageError
from paceline.workloads.alexnet import AlexNet, TinyAlexNet
from paceline.workloads.vgg import VGG16, TinyVGG

if TYPE_CHECKING:
    from paceline.training.model import Model

_MODELS: dict[str, type[Model]] = {
    "alexnet": AlexNet,
    "vgg16": VGG16,
    "tiny-alexnet": TinyAlexNet,
    "tiny-vgg": TinyVGG,
}


def build_model(name: str, classes: int, *, dropout: bool, seed: int) -> Model:
    """The model with its initial weights, in training mode, on the CPU, float32.

    The weights are a function of (name, classes, seed): torch's generator draws them one after the
    other whatever the number of threads, and neither reads nor moves the caller's generator.
    Raises UsageError for an unknown name or fewer than one class.
    """
    if name not in _MODELS:
        raise UsageError(f"model {name!r}: expected one of {', '.join(_MODELS)}")
    if classes < 1:
        raise UsageError(f"classes: expected at least 1, got {classes}")
    with torch.device("meta"):  # torch's own first drawing of the weights would be thrown away
        model = _MODELS[name](classes, dropout=dropout)
    model.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model.draw_weights()
    return model
