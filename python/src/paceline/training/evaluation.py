"""Evaluation of a model's weights on samples that the training does not use.

All strategies share it: the plain model computes with the weights that a strategy returns, in
evaluation mode (no dropout, running statistics), so the values do not depend on the strategy.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call

from paceline.errors import UsageError
from paceline.training.passes import autocast

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from paceline.data.reading import Batch
    from paceline.plan.trial import Training
    from paceline.training.task import Task

# Sums and counts of a metric, float64, of equal shape (elements,).
Sums = tuple[Tensor, Tensor]


class EvaluationModel:
    """A task's model without weights of its own, on one device."""

    def __init__(
        self, task: Task, model: nn.Module, training: Training, device: torch.device
    ) -> None:
        """model: its parameters are freed; it keeps only buffers that are not in its state."""
        self._task, self._training, self._device = task, training, device
        self._model = model.to(device).eval()
        state = self._model.state_dict()
        named = itertools.chain(model.named_parameters(), model.named_buffers())
        self._names = [name for name, _ in named if name in state]
        for parameter in model.parameters():
            parameter.data = torch.empty(0, device=device)

    @torch.no_grad()
    def sums(self, weights: Mapping[str, Tensor], batches: Iterable[Batch]) -> dict[str, Sums]:
        """Return the sums and counts of each metric over all samples of the batches.

        weights: the state of the whole model by its own names. Raises UsageError if
        `Task.evaluate` returns something else than it should.
        """
        state = {name: weights[name].to(self._device) for name in self._names}
        found: dict[str, Sums] = {}
        for batch in batches:
            if not len(batch.sample_ids):
                continue
            assert batch.inputs is not None, "the whole model evaluates, on every rank"
            inputs = self._task.to_input(batch.inputs).to(self._device)
            targets = torch.from_numpy(batch.targets).to(self._device)
            with autocast(self._training, self._device.type):
                outputs = functional_call(self._model, state, (inputs,))
                values = metric_sums(self._task, outputs, targets)
            for name, (total, count) in values.items():
                if name in found:
                    found[name] = (found[name][0] + total, found[name][1] + count)
                else:
                    found[name] = (total, count)
        return found


def metric_sums(task: Task, outputs: Tensor, targets: Tensor) -> dict[str, Sums]:
    """Return the sums and counts of `task.evaluate`; raise UsageError if it is not as expected."""
    metrics: object = task.evaluate(outputs, targets)
    if not isinstance(metrics, dict) or not metrics:
        raise _unexpected(task, "", "a dictionary with at least one metric", metrics)
    return {name: _sums(task, name, value, len(targets)) for name, value in metrics.items()}


def _sums(task: Task, name: str, value: object, samples: int) -> Sums:
    if isinstance(value, Tensor):
        if value.shape != (samples,):
            wanted = f"a tensor of shape ({samples},), one value for each sample"
            raise _unexpected(task, f"[{name!r}]", wanted, value)
        total = value.detach().double().sum().reshape(1).cpu()
        return total, torch.tensor([samples], dtype=torch.float64)
    if isinstance(value, tuple) and len(value) == 2:
        total, count = (torch.as_tensor(part).detach().double().cpu() for part in value)
        if total.shape == count.shape:
            return total.flatten(), count.flatten()
    raise _unexpected(
        task, f"[{name!r}]", "one value for each sample, or a sum and a count of equal shape", value
    )


def _unexpected(task: Task, place: str, wanted: str, got: object) -> UsageError:
    shape = f"shape {tuple(got.shape)}" if isinstance(got, Tensor) else repr(got)
    return UsageError(f"{type(task).__name__}.evaluate{place}: expected {wanted}, got {shape}")
