"""Global steps: what all ranks of a trial did together, from the rows that each wrote alone.

A global step ends when the last rank ends it. Its time is from the end of the step before to its
own end, so the times of all steps add up to the time that the training took, and nothing between
two steps (an epoch's end, a row being written) is left out. The first step, which has none before
it, is counted from the first rank's start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paceline.analysis.reading import RankRecord, TrialRecord
    from paceline.records.rows import StepRow

FINAL_STEPS = 10  # the final loss is the mean over so many last steps: one step is noise


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalSteps:
    """Arrays of one length: an entry for each step that every rank finished."""

    step: NDArray[np.int64]
    samples: NDArray[np.int64]  # trained on, of all ranks
    time_s: NDArray[np.float64]
    started_unix_s: NDArray[np.float64]  # on rank 0's clock
    ended_unix_s: NDArray[np.float64]
    loss: NDArray[np.float64]  # mean over the samples of the global batch

    def steady(self, warmup_steps: int) -> NDArray[np.bool_]:
        """Mask of the steps after the warm-up."""
        return self.step >= warmup_steps

    def samples_per_s(self, warmup_steps: int, period: int = 1) -> NDArray[np.float64]:
        """Samples of each steady round of `period` steps over its time, shape (rounds,)."""
        masks = self._rounds(warmup_steps, period)
        return np.array([self.samples[mask].sum() / self.time_s[mask].sum() for mask in masks])

    def step_s(self, warmup_steps: int, period: int = 1) -> NDArray[np.float64]:
        """Mean time of a step of each steady round, shape (rounds,)."""
        masks = self._rounds(warmup_steps, period)
        return np.array([float(np.mean(self.time_s[mask])) for mask in masks])

    def _rounds(self, warmup_steps: int, period: int) -> list[NDArray[np.bool_]]:
        """A mask of each complete round that begins after the warm-up.

        Where weights are averaged every so many steps, a median over steps would be one of steps
        that send nothing. Rounds begin at multiples of `period`; if none is complete, all steady
        steps are one.
        """
        steady = self.steady(warmup_steps)
        first = -(-warmup_steps // period) * period
        rounds = (self.step - first) // period
        kept = [r for r in np.unique(rounds[steady]) if r >= 0 and np.sum(rounds == r) == period]
        return [rounds == r for r in kept] or ([steady] if steady.any() else [])

    @property
    def final_loss(self) -> float | None:
        """Mean loss per sample over the last steps; None if there was no step."""
        if not len(self.step):
            return None
        weights = self.samples[-FINAL_STEPS:].astype(np.float64)
        return float(np.average(self.loss[-FINAL_STEPS:], weights=weights))


def rows_by_step(rank: RankRecord) -> dict[int, StepRow]:
    """A rank's rows by global step; of a step that was written twice, the last."""
    return {row.step: row for row in rank.steps}


def common_steps(record: TrialRecord) -> list[int]:
    """Steps that every rank finished, in order; empty if there are no ranks."""
    written = [{row.step for row in rank.steps} for rank in record.ranks]
    return sorted(set.intersection(*written)) if written else []


def global_steps(record: TrialRecord) -> GlobalSteps:
    """Merge the ranks' rows, bringing their clocks to rank 0's."""
    steps = common_steps(record)
    shape = (len(record.ranks), len(steps))
    started, ended, loss = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    samples = np.zeros(shape, dtype=np.int64)
    for i, rank in enumerate(record.ranks):
        rows = rows_by_step(rank)
        for j, step in enumerate(steps):
            row = rows[step]
            started[i, j] = row.started_unix_s + rank.clock_offset_s
            ended[i, j] = started[i, j] + row.step_s
            samples[i, j] = row.samples
            loss[i, j] = row.loss_sum
    if not steps:
        nothing = np.zeros(0)
        return GlobalSteps(
            step=np.zeros(0, np.int64),
            samples=np.zeros(0, np.int64),
            time_s=nothing,
            started_unix_s=nothing,
            ended_unix_s=nothing,
            loss=nothing,
        )
    total = samples.sum(axis=0)
    first, last = started.min(axis=0), ended.max(axis=0)
    return GlobalSteps(
        step=np.array(steps, dtype=np.int64),
        samples=total,
        time_s=np.diff(last, prepend=first[0]),
        started_unix_s=first,
        ended_unix_s=last,
        loss=loss.sum(axis=0) / np.maximum(total, 1),
    )
