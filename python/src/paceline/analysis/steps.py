"""Steps of a trial as one frame, and global steps: what all ranks did together.

A global step ends when the last rank ends it. Its time runs from the end of the previous step to
its own end, so the times of all steps add up to the time of the training, and nothing between two
steps (the end of an epoch, writing a row) is left out. The first step starts with its first rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from paceline.analysis.ranks import stage_of
from paceline.analysis.reading import read_rank_steps
from paceline.records.rows import StepRow
from paceline.records.tables import schema_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from paceline.analysis.reading import TrialRecord

FINAL_STEPS = 10  # the final loss is the mean over the last steps: one step is too noisy


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalSteps:
    """Arrays of one length: an entry for each step that every rank finished."""

    step: NDArray[np.int64]
    samples: NDArray[np.int64]  # trained on, by all ranks
    time_s: NDArray[np.float64]
    ended_unix_s: NDArray[np.float64]  # on rank 0's clock
    loss: NDArray[np.float64]  # mean over the samples of the global batch

    def steady(self, warmup_steps: int) -> NDArray[np.bool_]:
        """Return the mask of the steps after the warm-up."""
        return self.step >= warmup_steps

    def samples_per_s(self, warmup_steps: int, period: int = 1) -> NDArray[np.float64]:
        """Return the rate of each steady round of `period` steps, shape (rounds,)."""
        samples, seconds, _ = self._rounds(warmup_steps, period)
        return samples / seconds

    def step_s(self, warmup_steps: int, period: int = 1) -> NDArray[np.float64]:
        """Return the mean step time of each steady round, shape (rounds,)."""
        _, seconds, steps = self._rounds(warmup_steps, period)
        return seconds / steps

    def _rounds(
        self, warmup_steps: int, period: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return samples, seconds and steps of each complete round after the warm-up.

        Where weights are averaged every `period` steps, a median over steps would be that of steps
        without communication. Rounds begin at multiples of `period`; if none is complete, all
        steady steps form one.
        """
        steady = self.steady(warmup_steps)
        samples, seconds = self.samples[steady].astype(np.float64), self.time_s[steady]
        if period == 1 or not len(samples):
            return samples, seconds, np.ones(len(samples))
        first = -(-warmup_steps // period) * period
        rounds = (self.step[steady] - first) // period
        numbers, which, counts = np.unique(rounds, return_inverse=True, return_counts=True)
        kept = (numbers >= 0) & (counts == period)
        if not kept.any():
            return samples.sum(keepdims=True), seconds.sum(keepdims=True), np.array([len(samples)])
        return (
            np.bincount(which, samples)[kept],
            np.bincount(which, seconds)[kept],
            counts[kept].astype(np.float64),
        )

    @property
    def final_loss(self) -> float | None:
        """Mean loss per sample over the last steps; None if there was no step."""
        if not len(self.step):
            return None
        weights = self.samples[-FINAL_STEPS:].astype(np.float64)
        return float(np.average(self.loss[-FINAL_STEPS:], weights=weights))


def read_steps(record: TrialRecord) -> pl.DataFrame:
    """Read the steps of all ranks; see `step_table`. Raises DataError if a row is damaged."""
    return step_table(record, read_rank_steps(record.files, record.ranks))


def step_table(record: TrialRecord, rows: Mapping[int, pl.DataFrame]) -> pl.DataFrame:
    """Join the step rows of all ranks into one frame, sorted by step and rank.

    The frame has the fields of StepRow and: rank, stage, started_s, ended_s and ready_s (when the
    rank's last gradient was ready) on rank 0's clock, comm_wait_s and comm_transfer_s. Of a step
    that was written twice, the last row counts.

    comm_wait_s is the part of comm_s in which a rank waited for the slowest rank's gradients; the
    rest is transfer. In a pipeline, only ranks of one stage average with one another.

    rows: the fields of StepRow by rank.
    """
    parts = [
        rows[rank.rank]
        .lazy()
        .with_columns(
            pl.lit(rank.rank, dtype=pl.Int64).alias("rank"),
            pl.lit(stage_of(record.trial, rank), dtype=pl.Int64).alias("stage"),
            (pl.col("started_unix_s") + rank.clock_offset_s).alias("started_s"),
            (pl.col("comm_ready_unix_s") + rank.clock_offset_s).alias("ready_s"),
        )
        for rank in record.ranks
    ]
    joined = pl.concat(parts) if parts else _empty().lazy()
    table = _with_waits(joined.sort("step", "rank", maintain_order=True)).collect()
    key = table["step"].to_numpy(), table["rank"].to_numpy()
    if len(table) and ((np.diff(key[0]) == 0) & (np.diff(key[1]) == 0)).any():
        unique = joined.unique(["step", "rank"], keep="last", maintain_order=True)
        return _with_waits(unique.sort("step", "rank")).collect()
    return table


def _with_waits(steps: pl.LazyFrame) -> pl.LazyFrame:
    """Divide comm_s into waiting and transfer."""
    slowest = pl.col("ready_s").max().over("step", "stage")
    late = (slowest - pl.col("ready_s")).clip(0.0).fill_null(0.0)
    # null where there was no communication
    wait = pl.when(pl.col("comm_s") < late).then(pl.col("comm_s")).otherwise(late)
    return steps.with_columns(
        (pl.col("started_s") + pl.col("step_s")).alias("ended_s"),
        pl.when(pl.col("comm_s").is_not_null()).then(wait).alias("comm_wait_s"),
    ).with_columns((pl.col("comm_s") - pl.col("comm_wait_s")).alias("comm_transfer_s"))


def common_steps(steps: pl.DataFrame, ranks: int) -> list[int]:
    """List the steps that every rank finished, in order; empty if there are no ranks."""
    counts = steps.group_by("step", maintain_order=True).len()
    return counts.filter(pl.col("len") == ranks)["step"].to_list()


def global_steps(record: TrialRecord, steps: pl.DataFrame | None = None) -> GlobalSteps:
    """Merge the rows of all ranks. steps: from `step_table`; None reads them."""
    table = read_steps(record) if steps is None else steps
    if table.is_empty():
        nothing = np.zeros(0)
        whole = np.zeros(0, dtype=np.int64)
        return GlobalSteps(
            step=whole, samples=whole, time_s=nothing, ended_unix_s=nothing, loss=nothing
        )
    step = table["step"].to_numpy()
    first = np.flatnonzero(np.diff(step, prepend=step[0] - 1))  # row of each step's first rank
    complete = np.diff(first, append=len(step)) == len(record.ranks)
    samples = np.add.reduceat(table["samples"].to_numpy(), first)[complete]
    started = np.minimum.reduceat(table["started_s"].to_numpy(), first)[complete]
    ended = np.maximum.reduceat(table["ended_s"].to_numpy(), first)[complete]
    loss_sum = np.add.reduceat(table["loss_sum"].to_numpy(), first)[complete]
    return GlobalSteps(
        step=step[first][complete],
        samples=samples,
        time_s=np.diff(ended, prepend=started[:1]),
        ended_unix_s=ended,
        loss=loss_sum / np.maximum(samples, 1),
    )


def _empty() -> pl.DataFrame:
    schema = {**(schema_of(StepRow) or {}), "rank": pl.Int64(), "stage": pl.Int64()}
    return pl.DataFrame(schema={**schema, "started_s": pl.Float64(), "ready_s": pl.Float64()})
