"""Evaluations of a trial, and the time in which it reached its target.

Time is that of the training: of all steps from the first one on, warm-up steps included, and
without the evaluations themselves, as in AlgoPerf. The first evaluation that meets the target
counts (MLPerf Training, AlgoPerf).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from paceline.analysis.statistics.rates import RepeatRate
from paceline.analysis.trial.reading import TrialRecord
from paceline.analysis.trial.steps import GlobalSteps
from paceline.measure.records.rows import EvaluationRow
from paceline.measure.records.tables import read_table

_FIELDS = ("steps", "epoch", "metric", "sums", "counts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """The evaluations of a trial in order: arrays of shape (evaluations,)."""

    steps: NDArray[np.int64]  # optimiser steps before each one
    epoch: NDArray[np.int64]  # of the last of them
    samples: NDArray[np.int64]  # trained on before, by all ranks
    training_s: NDArray[np.float64]  # time of these steps
    wall_s: NDArray[np.float64]  # since the first of them began, earlier evaluations included
    epochs: NDArray[np.float64]  # trained on before; NaN if not even one was finished
    metrics: Mapping[str, NDArray[np.float64]]
    # metrics that count samples: the values are multiples of 1 / count
    resolution: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTime:
    """Time in which one repeat reached its target; of the whole training if it did not."""

    reached: bool
    steps: int
    seconds: float

    @property
    def rate(self) -> RepeatRate:
        """One over the time."""
        return RepeatRate(log_rate=-math.log(self.seconds))


def read_evaluations(record: TrialRecord, steps: GlobalSteps) -> Evaluations | None:
    """Join the rows of all ranks; None if there are none. Raises DataError if one is damaged."""
    if record.trial.training.evaluation is None or not record.ranks:
        return None
    rows = pl.concat(
        read_table(record.files.rank(rank.rank).evaluations, EvaluationRow, _FIELDS)
        for rank in record.ranks
    )
    if rows.is_empty():
        return None
    numbers = np.unique(rows["steps"].to_numpy())
    metrics: dict[str, NDArray[np.float64]] = {}
    resolution: dict[str, float] = {}
    for (metric,), found in rows.group_by("metric", maintain_order=True):
        by_steps = {number: group for (number,), group in found.group_by("steps")}
        sums = [_total(by_steps[n]["sums"]) for n in numbers if n in by_steps]
        counts = [_total(by_steps[n]["counts"]) for n in numbers if n in by_steps]
        if len(sums) < len(numbers):
            continue  # not recorded at every evaluation
        metrics[str(metric)] = np.array([_mean(s, c) for s, c in zip(sums, counts, strict=True)])
        if all(np.array_equal(total, np.rint(total)) for total in sums):
            smallest = np.concatenate(counts)
            resolution[str(metric)] = 1 / float(smallest[smallest > 0].min(initial=np.inf))
    epochs = rows.group_by("steps").agg(pl.col("epoch").max()).sort("steps")["epoch"]
    before = np.searchsorted(steps.step, numbers)
    samples = np.concatenate([[0], np.cumsum(steps.samples)])[before]
    elapsed_s = steps.ended_unix_s - (steps.ended_unix_s[:1] - steps.time_s[:1])
    return Evaluations(
        steps=numbers,
        epoch=epochs.to_numpy(),
        samples=samples,
        training_s=np.concatenate([[0.0], np.cumsum(steps.time_s)])[before],
        wall_s=np.concatenate([[0.0], elapsed_s])[before],
        epochs=samples / _samples_per_epoch(record, steps),
        metrics=metrics,
        resolution=resolution,
    )


def _samples_per_epoch(record: TrialRecord, steps: GlobalSteps) -> float:
    """Return the samples of the first epoch; NaN if the training ended within it."""
    limited = record.trial.training.max_steps is not None
    is_whole = len(steps.epoch) and (steps.epoch[-1] > 0 or not limited)
    return float(steps.samples[steps.epoch == 0].sum()) if is_whole else math.nan


def target_time(
    record: TrialRecord, steps: GlobalSteps, evaluations: Evaluations | None
) -> TargetTime | None:
    """Return the time to the target; None without a target, or without its metric."""
    target = record.trial.training.target
    if target is None or evaluations is None:
        return None
    values = evaluations.metrics.get(target.metric)
    if values is None or not len(steps.step):
        return None
    reached = (i for i, value in enumerate(values) if target.reached(float(value)))
    first = next(reached, None)
    count = len(steps.step) if first is None else int(evaluations.steps[first])
    seconds = float(steps.time_s[steps.step < count].sum())
    return TargetTime(reached=first is not None, steps=count, seconds=seconds)


def _total(lists: pl.Series) -> NDArray[np.float64]:
    total: NDArray[np.float64] = np.sum(np.array(lists.to_list(), dtype=np.float64), axis=0)
    return total


def _mean(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> float:
    """Return the mean over the elements that count anything; NaN if none does."""
    known = counts > 0
    return float(np.mean(sums[known] / counts[known])) if known.any() else math.nan
