"""Evaluations of one rank: its share of the samples that are held out, between two steps."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.records.files import JsonlWriter
from paceline.records.rows import EvaluationRow
from paceline.training.devices import device_of
from paceline.training.evaluation import EvaluationModel
from paceline.workloads.build import build_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor

    from paceline.data.reading import Batch
    from paceline.plan.rank_context import RankContext
    from paceline.plan.sample_order import SampleOrder
    from paceline.plan.trial import Trial
    from paceline.training.strategy import LocalStrategy
    from paceline.training.task import Task
    from paceline.worker.peers import Peers


class Evaluator:
    """Evaluates the weights of a strategy when it is due, and records the sums of this rank."""

    def __init__(
        self,
        trial: Trial,
        task: Task,
        order: SampleOrder,
        context: RankContext,
        open_feed: Callable[[], AbstractContextManager[Iterable[Batch]]],
        rows: Path,
    ) -> None:
        """order: of the training. open_feed: opens this rank's share of the held-out samples.

        Raises UsageError if the task's metrics are not as expected, or lack that of the target.
        """
        assert trial.training.evaluation is not None, "there is nothing to evaluate"
        self._evaluation, self._order = trial.training.evaluation, order
        self._open_feed = open_feed
        self._rows = rows
        self._limit_s = trial.limits.collective_s
        model = build_model(task)
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
        sums = self._model.sums(strategy.weights_to_evaluate(), self._batches())
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
        world = peers.world(f"evaluation/{step}")
        if world is not None:
            world.barrier(self._limit_s)

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
