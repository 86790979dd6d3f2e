"""Steps of a trial: step rows of all ranks in arrays, and global steps.

A global step ends when the last rank ends it. Its time runs from the end of the previous step to
its own end, so the times of all steps add up to the time of the training, and nothing between two
steps (the end of an epoch, writing a row) is left out, except for evaluations, and for weights and
states that are kept for the comparison with the baseline. The first step, and the first one after
such a pause, starts with its first rank. The first step after a failure includes the time of the
recovery.

Steady steps are what every figure of a step is computed from: steps that all ranks finished, after
the warm-up, and after as many steps of each continuation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from paceline.analysis.statistics.rates import RepeatRate, repeat_rate
from paceline.analysis.trial.reading import RankRecord, TrialRecord
from paceline.measure.records.phases import kept_after
from paceline.measure.records.rows import EvaluationRow, StepRow
from paceline.measure.records.tables import read_table
from paceline.plan.trials.trial import Trial

FINAL_STEPS = 10  # the final loss is the mean over the last steps: one step is too noisy
_FIELDS = (
    "step", "epoch", "started_unix_s", "samples", "loss_sum", "data_wait_s", "forward_s",
    "backward_s", "bubble_s", "comm_s", "comm_ready_unix_s", "optimizer_s", "other_s", "step_s",
    "pass_comm_s", "comm_ended_unix_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """Step rows of all ranks, by field: arrays of shape (ranks, steps), NaN without a value.

    Fields are the numbers of StepRow and: started_s, ended_s, ready_s (when the rank's last
    gradient was ready), comm_ended_s (when the communication from then on ended), own_ready_s (when
    it would have been ready without pass_comm_s) and even_ready_s (the same, had the communication
    before ended on all ranks at once) on rank 0's clock, comm_wait_s and comm_transfer_s.

    comm_wait_s is the part of comm_s + pass_comm_s in which a rank waited for the slowest one: the
    distance of their own_ready_s, but at most that of their even_ready_s. A rank that is late only
    because its last sum ended late is not slow. The rest is transfer. Where another rank is the
    slowest in each layer, these waits count as transfer. In a pipeline, only ranks of one stage
    average with one another.
    """

    ranks: tuple[int, ...]
    stages: NDArray[np.int64]  # by rank: the stage of the model that it holds
    step: NDArray[np.int64]  # in order; those that any rank finished
    fields: Mapping[str, NDArray[np.float64]]
    warmup_steps: int
    resumed: NDArray[np.int64]  # see GlobalSteps
    after_pauses: NDArray[np.int64]  # those before which the ranks did other work

    def __getitem__(self, field: str) -> NDArray[np.float64]:
        return self.fields[field]

    @property
    def is_finished(self) -> NDArray[np.bool_]:
        """Mask of the steps that a rank finished, shape (ranks, steps)."""
        return ~np.isnan(self["step_s"])

    def steady(self) -> RankSteps:
        """Return the steady steps."""
        is_kept = _is_steady(self.step, self.warmup_steps, self.resumed)
        is_kept &= self.is_finished.all(axis=0)
        places = np.flatnonzero(is_kept)
        # Usually these are all steps from one on: a slice copies nothing.
        is_rest = len(places) == len(self.step) - int(places[0]) if len(places) else False
        kept = slice(int(places[0]), None) if is_rest else is_kept
        fields = {name: values[:, kept] for name, values in self.fields.items()}
        return replace(self, step=self.step[kept], fields=fields)

    def of_rank(self, rank: int) -> pl.DataFrame:
        """Return the steps that one rank finished, in order; null without a value."""
        number = self.ranks.index(rank)
        finished = self.is_finished[number]
        own = {name: values[number, finished] for name, values in self.fields.items()}
        whole = pl.col("step", "epoch", "samples").cast(pl.Int64)
        return pl.DataFrame(own, nan_to_null=True).with_columns(whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalSteps:
    """Arrays of one length: an entry for each step that every rank finished."""

    step: NDArray[np.int64]
    epoch: NDArray[np.int64]
    samples: NDArray[np.int64]  # trained on, by all ranks
    time_s: NDArray[np.float64]
    ended_unix_s: NDArray[np.float64]  # on rank 0's clock
    loss: NDArray[np.float64]  # mean over the samples of the global batch; NaN if unknown
    warmup_steps: int = 0
    # with which the training continued after failures; their time includes the recovery
    resumed: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    # False for a script that does not state its samples: then each step counts as one sample
    samples_known: bool = True

    @property
    def steady(self) -> NDArray[np.bool_]:
        """Mask of the steady steps."""
        return _is_steady(self.step, self.warmup_steps, self.resumed)

    def rounds(
        self, period: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return samples, seconds and steps of each complete round after the warm-up.

        Where weights are averaged every `period` steps, an incomplete round would have steps
        without their communication. Rounds begin at multiples of `period`; if none is complete, all
        steady steps form one.
        """
        steady = self.steady
        samples, seconds = self.samples[steady].astype(np.float64), self.time_s[steady]
        if period == 1 or not len(samples):
            return samples, seconds, np.ones(len(samples))
        first = -(-self.warmup_steps // period) * period
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
        """Mean loss per sample over the last steps; None if there was no step or no loss."""
        if not len(self.step):
            return None
        weights = self.samples[-FINAL_STEPS:].astype(np.float64)
        loss = float(np.average(self.loss[-FINAL_STEPS:], weights=weights))
        return None if math.isnan(loss) else loss


def read_steps(record: TrialRecord) -> RankSteps:
    """Read the steps of all ranks. Raises DataError if a row is damaged."""
    rows = {
        rank.rank: read_table(record.files.rank(rank.rank).steps, StepRow, _FIELDS)
        for rank in record.ranks
    }
    return rank_steps(record, rows)


def rank_steps(record: TrialRecord, rows: Mapping[int, pl.DataFrame]) -> RankSteps:
    """Align the step rows of all ranks. Of a step that was written twice, the last row counts.

    rows: by rank; the fields of StepRow.
    """
    step, fields = _aligned([rows[rank.rank] for rank in record.ranks])
    offsets_s = np.array([[rank.clock_offset_s] for rank in record.ranks]).reshape(-1, 1)
    stages = np.array([stage_of(record.trial, rank) for rank in record.ranks], dtype=np.int64)
    fields["started_s"] = fields["started_unix_s"] + offsets_s
    fields["ended_s"] = fields["started_s"] + fields["step_s"]
    fields["ready_s"] = fields["comm_ready_unix_s"] + offsets_s
    ended_s = fields["comm_ended_unix_s"] + offsets_s  # NaN where nothing was computed meanwhile
    fields["comm_ended_s"] = np.fmax(ended_s, fields["ready_s"] + fields["comm_s"])
    within_s = np.nan_to_num(fields["pass_comm_s"])
    fields["own_ready_s"] = fields["ready_s"] - within_s
    ended_before_s = _last_end(fields["comm_ended_s"])
    after_pauses = _steps_after_pauses(record, step)
    ended_before_s[:, np.isin(step, after_pauses)] = np.nan
    fields["even_ready_s"] = _even_ready(fields["own_ready_s"], ended_before_s, stages)
    exposed_s = fields["comm_s"] + within_s
    late_s = np.fmin(
        _lateness(fields["own_ready_s"], stages), _lateness(fields["even_ready_s"], stages)
    )
    fields["comm_wait_s"] = np.minimum(exposed_s, np.nan_to_num(late_s))
    fields["comm_transfer_s"] = exposed_s - fields["comm_wait_s"]
    return RankSteps(
        ranks=tuple(rank.rank for rank in record.ranks),
        stages=stages,
        step=step,
        fields=fields,
        warmup_steps=record.trial.training.warmup_steps,
        resumed=resumed_steps(record),
        after_pauses=after_pauses,
    )


def stage_of(trial: Trial, rank: RankRecord) -> int:
    """Return the stage of the model that a rank holds; 0 without a pipeline.

    Of s stages, local rank L holds stage L mod s of replica L div s.
    """
    if rank.environment is not None:
        local_rank = rank.environment.local_rank
    else:
        local_rank = rank.rank % trial.placement.ranks_per_node
    return local_rank % trial.placement.stages


def global_steps(record: TrialRecord, steps: RankSteps | None = None) -> GlobalSteps:
    """Merge the rows of all ranks. steps: of all ranks; None reads them."""
    steps = read_steps(record) if steps is None else steps
    is_common = steps.is_finished.all(axis=0)
    common = slice(None) if is_common.all() else is_common
    distinct = _ranks_of_distinct_samples(record)
    by_rank = steps["samples"][distinct][:, common]
    samples_known = not np.isnan(by_rank).any()
    parts = np.nan_to_num(by_rank, nan=1.0).sum(axis=0)  # a loss without samples is a mean
    samples = parts if samples_known else np.ones(len(parts))
    ended = steps["ended_s"][:, common].max(axis=0, initial=-np.inf)
    first_started = steps["started_s"][:, common].min(axis=0, initial=np.inf)
    started = np.concatenate([first_started[:1], ended[:-1]])
    follows_pause = np.isin(steps.step[common], steps.after_pauses)
    follows_pause &= ~np.isin(steps.step[common], steps.resumed)
    started[follows_pause] = first_started[follows_pause]
    return GlobalSteps(
        step=steps.step[common],
        epoch=np.nan_to_num(steps["epoch"][:, common].max(axis=0, initial=0)).astype(np.int64),
        samples=samples.astype(np.int64),
        time_s=ended - started,
        ended_unix_s=ended,
        loss=steps["loss_sum"][distinct][:, common].sum(axis=0) / np.maximum(parts, 1),
        samples_known=samples_known,
        warmup_steps=steps.warmup_steps,
        resumed=steps.resumed,
    )


def samples_rate(record: TrialRecord, steps: GlobalSteps) -> RepeatRate | None:
    """Return the samples per second of the steady steps, with stalls; None if there are none."""
    samples, seconds, _ = steps.rounds(record.trial.round_steps)
    return repeat_rate(samples, seconds)


def _ranks_of_distinct_samples(record: TrialRecord) -> list[int]:
    """Return the places of ranks that hold samples of their own; one of those with the same."""
    first: dict[object, int] = {}
    for place, rank in enumerate(record.ranks):
        batch = None if rank.environment is None else rank.environment.first_batch_sha256
        first.setdefault(place if batch is None else batch, place)
    return list(first.values())


def _is_steady(
    step: NDArray[np.int64], warmup_steps: int, resumed: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return the mask of the steps after the warm-up, and after one of each continuation.

    The first step of a continuation is never steady: its time includes the recovery.
    """
    steady: NDArray[np.bool_] = step >= warmup_steps
    for first in resumed:
        steady &= (step < first) | (step >= first + max(1, warmup_steps))
    return steady


def _aligned(ranks: list[pl.DataFrame]) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
    """Return the steps of all ranks, and their fields, each of shape (ranks, steps).

    ranks: the rows of each rank.
    """
    steps = [rows["step"].to_numpy() for rows in ranks]
    step = steps[0] if steps else np.zeros(0, dtype=np.int64)
    is_aligned = all(np.array_equal(each, step) for each in steps) and (np.diff(step) > 0).all()
    if not is_aligned:
        step = np.unique(np.concatenate(steps))
    fields = {name: np.full((len(ranks), len(step)), np.nan) for name in _FIELDS}
    for number, (rows, own) in enumerate(zip(ranks, steps, strict=True)):
        places = slice(None) if is_aligned else np.searchsorted(step, own)
        for name, values in fields.items():
            values[number, places] = rows[name].to_numpy()  # NaN where it is null
    return step, fields


def _last_end(ended_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return when the last communication before each step had ended; NaN before the first one.

    ended_s: the end of each step's communication, NaN without one, shape (ranks, steps).
    """
    never = np.full((len(ended_s), 1), np.nan)
    ended_s = np.concatenate([never, ended_s], axis=1)
    last = np.where(np.isnan(ended_s), 0, np.arange(ended_s.shape[1]))
    before = np.maximum.accumulate(last, axis=1)[:, :-1]
    return np.take_along_axis(ended_s, before, axis=1)


def _even_ready(
    ready_s: NDArray[np.float64], ended_before_s: NDArray[np.float64], stages: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return when each rank would have been ready, had all of its stage begun at the same time.

    Where one of them has no communication before, this is `ready_s`.
    """
    even_s = ready_s.copy()
    for stage in np.unique(stages):
        same = stages == stage
        head_start_s = ended_before_s[same].max(axis=0) - ended_before_s[same]
        even_s[same] += np.nan_to_num(head_start_s)
    return even_s


def _lateness(ready_s: NDArray[np.float64], stages: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return how much later than each rank the slowest one of its stage was ready; NaN unknown."""
    slowest_s = np.zeros_like(ready_s)
    for stage in np.unique(stages):
        same = stages == stage
        slowest_s[same] = np.fmax.reduce(ready_s[same], axis=0)
    return slowest_s - ready_s


def _steps_after_pauses(record: TrialRecord, step: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the steps that follow an evaluation, or the keeping of what is compared, ascending.

    step: all steps of the training, in order.
    """
    steps = 0 if len(step) == 0 else int(step[-1]) + 1
    kept = kept_after(steps) if record.trial.is_replayed else ()
    found = [np.array(kept, dtype=np.int64)]
    if record.trial.training.evaluation is not None:
        found += [
            read_table(record.files.rank(rank.rank).evaluations, EvaluationRow, ("steps",))[
                "steps"
            ].to_numpy()
            for rank in record.ranks
        ]
    return np.unique(np.concatenate(found))


def resumed_steps(record: TrialRecord) -> NDArray[np.int64]:
    """Return the steps with which attempts after the first one began, ascending."""
    found = [row.resumed_steps for rank in record.ranks for row in rank.continuations]
    return np.unique(np.array(found, dtype=np.int64))
