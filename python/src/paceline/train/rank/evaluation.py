"""Evaluations of one rank: its share of the samples that are held out, between two steps.

All strategies share them: the plain model computes with the weights that a strategy returns, in
evaluation mode (no dropout, running statistics), so the values do not depend on the strategy.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from paceline.base.errors import UsageError
from paceline.measure.records.files import JsonlWriter
from paceline.measure.records.rows import EvaluationRow
from paceline.plan.trials.sample_order import SampleOrder
from paceline.plan.trials.trial import RankContext, Training, Trial
from paceline.train.data.batches import Batch
from paceline.train.rank.peers import Peers
from paceline.train.training.devices import device_of
from paceline.train.training.passes import autocast
from paceline.train.training.strategy import LocalStrategy
from paceline.train.training.task import Task


class Evaluator:
    """Evaluates the weights of a strategy when it is due, and records the sums of this rank."""

    def __init__(
        self,
        trial: Trial,
        task: Task,
        model: nn.Module,
        order: SampleOrder,
        context: RankContext,
        open_feed: Callable[[], AbstractContextManager[Iterable[Batch]]],
        rows: Path,
    ) -> None:
        """model: with its first weights. order: of the training. open_feed: opens this rank's
        share of the held-out samples.

        Raises UsageError if the task's metrics are not as expected, or lack that of the target.
        """
        assert trial.training.evaluation is not None, "there is nothing to evaluate"
        self._evaluation, self._order = trial.training.evaluation, order
        self._open_feed = open_feed
        self._rows = rows
        self._threads = trial.placement.threads_per_rank
        self._limit_s = trial.limits.collective_s
        initial = model.state_dict()
        self._model = EvaluationModel(task, model, trial.training, device_of(trial, context))
        # Decoded samples are kept where those of the training are.
        keeps = trial.training.reading == "memory"
        self._kept = list(self._read()) if keeps else None
        self._check(initial)

    def is_due(self, step: int) -> bool:
        return self._evaluation.is_due(step, self._order.steps_per_epoch, self._order.steps)

    def run(self, strategy: LocalStrategy, step: int, epoch: int, peers: Peers) -> None:
        """Evaluate the weights after `step`, and wait for all ranks; collective."""
        started_unix_s = time.time()
        weights = strategy.weights_to_evaluate()
        with _intraop_threads(self._threads):  # workers in other threads are idle
            sums = self._model.sums(weights, self._batches())
        ended_unix_s = time.time()
        with JsonlWriter(self._rows) as rows:
            rows.write_all(
                EvaluationRow(
                    steps=step + 1,
                    epoch=epoch,
                    metric=metric,
                    sums=total.tolist(),
                    counts=count.tolist(),
                    started_unix_s=started_unix_s,
                    ended_unix_s=ended_unix_s,
                )
                for metric, (total, count) in sums.items()
            )
        # Ranks share weights, so none may begin the next step while another one evaluates.
        peers.world(f"evaluation/{step}").barrier(self._limit_s)

    def _batches(self) -> Iterable[Batch]:
        return self._read() if self._kept is None else self._kept

    def _read(self) -> Iterator[Batch]:
        with self._open_feed() as feed:
            yield from feed

    def _check(self, initial: dict[str, Tensor]) -> None:
        """Evaluate a batch with the initial weights, so that faults are found before training."""
        metrics = self._model.sums(initial, itertools.islice(self._batches(), 1))
        target = self._evaluation.target
        if metrics and target is not None and target.metric not in metrics:
            raise UsageError(
                f"target: expected a metric of the task ({', '.join(metrics)}), got "
                f"{target.metric!r}; change target, or return it from evaluate()"
            )


@contextmanager
def _intraop_threads(threads: int) -> Iterator[None]:
    """Let this thread use so many threads within an operation meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
