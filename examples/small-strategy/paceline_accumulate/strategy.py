"""Implementation of `accumulate`, imported only in the rank that trains."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from paceline.train.strategies.ddp import DdpStrategy
from paceline.train.training.strategy import GradientResult

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from paceline.plan.trials.trial import RankContext, Trial
    from paceline.train.training.strategy import RankGroups, TrainBatch
    from paceline.train.training.task import Task


class AccumulateStrategy(DdpStrategy):
    """One model; `gradient` sums the gradients of the pieces, everything else is inherited.

    Every piece divides its loss by the number of samples of the whole global batch, so the sum of
    the pieces' gradients is the gradient of the mean loss.
    """

    def prepare(
        self, task: Task, model: nn.Module, context: RankContext, trial: Trial, peers: RankGroups
    ) -> None:
        """Take the model and the number of pieces."""
        super().prepare(task, model, context, trial, peers)
        self._parameters = list(model.parameters())
        self._pieces: int = trial.option("pieces")

    def gradient(self, batch: TrainBatch) -> GradientResult:
        """Compute the gradient of a batch piece by piece."""
        sums: list[Tensor | None] = [None] * len(self._parameters)
        results = []
        for piece in self._split(batch):
            results.append(super().gradient(piece))
            sums = [_sum(p.grad, s) for p, s in zip(self._parameters, sums, strict=True)]
        for parameter, total in zip(self._parameters, sums, strict=True):
            parameter.grad = total
        return GradientResult(
            loss_sum=sum(r.loss_sum for r in results),
            forward_s=sum(r.forward_s for r in results),
            backward_s=sum(r.backward_s for r in results),
            comm_s=None,
            comm_ready_unix_s=None,
        )

    def _split(self, batch: TrainBatch) -> Iterator[TrainBatch]:
        """Yield the pieces: consecutive samples, as equal as possible."""
        samples = len(batch.sample_ids)
        bounds = [samples * i // self._pieces for i in range(self._pieces + 1)]
        for start, end in pairwise(bounds):
            yield replace(
                batch,
                inputs=batch.inputs[start:end],
                targets=batch.targets[start:end],
                sample_ids=batch.sample_ids[start:end],
            )


def _sum(gradient: Tensor | None, total: Tensor | None) -> Tensor | None:
    """Return the sum; either may be missing, as torch leaves unused gradients None."""
    if gradient is None or total is None:
        return total if gradient is None else gradient
    return total.add_(gradient)
