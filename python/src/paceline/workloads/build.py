"""Build the model of a workload with its initial weights."""

from __future__ import annotations

import torch

from paceline.errors import UsageError
from paceline.spec.extensions import WORKLOADS, load_object, quoted
from paceline.training.model import Model


def build_model(model: str, classes: int, *, dropout: bool, seed: int) -> Model:
    """Return a model with its initial weights, in training mode, on the CPU, float32.

    model: as in `model_class`. The weights are a function of (model, classes, seed): torch's
    generator draws them one after the other for any number of threads, and the state of the
    caller's generator neither matters nor changes.
    Raises UsageError for an unknown model or fewer than one class.
    """
    if classes < 1:
        raise UsageError(f"classes: expected at least 1, got {classes}")
    built = on_meta_device(model, classes, dropout=dropout)
    built.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        built.draw_weights()
    return built


def on_meta_device(model: str, classes: int, *, dropout: bool) -> Model:
    """Return the model without memory for its weights, and without drawing them."""
    with torch.device("meta"):
        return model_class(model)(classes, dropout=dropout)


def model_class(model: str) -> type[Model]:
    """Return the class of a model: the name that a workload gives it, or "module:class".

    Raises UsageError if no workload has a model of that name.
    """
    if ":" in model:
        found: type[Model] = load_object(model)
        return found
    for workload in WORKLOADS.all():
        if workload.model == model:
            return model_class(workload.implementation)
    known = tuple(workload.model for workload in WORKLOADS.all())
    raise UsageError(f'model: expected one of {quoted(known)}, got "{model}"')
