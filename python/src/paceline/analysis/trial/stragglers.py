"""Straggler detection: find the rank that makes the others wait.

All-reduce makes every rank equally slow, but not equally late. The communication of a step cannot
end before the last rank's gradients are ready. No lateness of a rank's own is the time that it
spent in communication of layers before that, nor that by which its communication of the step
before ended later. Both are subtracted. The straggler delay of the last
rank is its lateness relative to the second-slowest rank; it is 0 for all other ranks. A rank is
called a straggler if its mean delay per step is at least twice that of the next rank, if that
difference is significant over the steps, if it is larger than the clock error, and if it is at
least 1 % of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from paceline.analysis.statistics.intervals import Estimate, Mean, mean_over_steps
from paceline.analysis.trial.phases import mean_step, mean_steps
from paceline.analysis.trial.reading import RankRecord, TrialRecord
from paceline.analysis.trial.steps import RankSteps
from paceline.measure.records.rows import UpdateRow
from paceline.measure.records.tables import read_table

_LEAST_SHARE = 0.01  # of a step: smaller delays are not reported
_LEAST_STEPS = 5  # fewer steps allow no claim
# Confidence that the first rank's delay exceeds the second's. Every profile makes this test, and
# most trials have no straggler.
_CONFIDENCE = 0.99
_NOT_OWN = ("comm_wait", "comm_transfer", "bubble")  # phases in which a rank waits for others


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """Straggler delay of one rank."""

    rank: int
    host: str | None
    last_share: float  # of the steps: those in which it was the last
    delay_s: Mean  # per step: lateness relative to the second-slowest rank
    delay_share: float  # of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggling:
    """Verdict on the ranks that average with one another."""

    stage: int | None  # None without a pipeline
    steps: int
    ranks: tuple[Lateness, ...]  # largest delay first
    straggler: int | None
    reason: str | None  # why no rank is a straggler
    clock_error_s: float  # of comparing the first two ranks
    phase: str | None = None  # in which the straggler spends more than the others
    phase_excess_s: float | None = None  # how much more, a step


def find_straggler(
    record: TrialRecord, steps: RankSteps, errors_s: Mapping[int, float]
) -> tuple[Straggling, ...]:
    """Return one verdict; in a pipeline, one for each stage that has several replicas.

    errors_s: of each rank's clock.
    """
    stages: dict[int, list[RankRecord]] = {}
    for rank, stage in zip(record.ranks, steps.stages.tolist(), strict=True):
        stages.setdefault(stage, []).append(rank)
    return tuple(
        _among(steps, ranks, errors_s, stage if record.trial.placement.stages > 1 else None)
        for stage, ranks in sorted(stages.items())
        if len(ranks) > 1
    )


def _among(
    steps: RankSteps,
    ranks: Sequence[RankRecord],
    errors_s: Mapping[int, float],
    stage: int | None,
) -> Straggling:
    ready, _, step_s = ready_times(steps, ranks)
    delays = delays_of(ready)
    found = []
    for number, rank in enumerate(ranks):
        delay = mean_over_steps(delays[number])
        if delay is not None:
            found.append(
                Lateness(
                    rank=rank.rank,
                    host=rank.host,
                    last_share=float(np.mean(ready.argmax(axis=0) == number)),
                    delay_s=delay.as_mean(),
                    delay_share=delay.value / step_s,
                )
            )
    late = sorted(found, key=lambda each: -each.delay_s.mean)
    if not late:
        return Straggling(
            stage=stage,
            steps=0,
            ranks=(),
            straggler=None,
            reason="no step in which all of them communicated",
            clock_error_s=0.0,
        )
    numbers = {rank.rank: number for number, rank in enumerate(ranks)}
    first, second = (numbers[each.rank] for each in late[:2])
    error_s = errors_s[late[0].rank] + errors_s[late[1].rank]
    ahead = mean_over_steps(delays[first] - delays[second], _CONFIDENCE)
    reason = _why_none(late, ahead, error_s, ready.shape[1])
    verdict = Straggling(
        stage=stage,
        steps=ready.shape[1],
        ranks=tuple(late),
        straggler=None if reason else late[0].rank,
        reason=reason,
        clock_error_s=error_s,
    )
    return verdict if reason else _with_phase(steps, verdict, ranks)


def delays_of(ready: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the straggler delay of each rank in each step, same shape as `ready`.

    It is positive for the last rank of a step and 0 for the others.
    ready: on one clock, shape (ranks, steps), at least two ranks.
    """
    ordered = np.sort(ready, axis=0)
    gap = ordered[-1] - ordered[-2]
    last = np.arange(len(ready))[:, None] == ready.argmax(axis=0)
    delays: NDArray[np.float64] = np.where(last, gap, 0.0)
    return delays


def ready_times(
    steps: RankSteps, ranks: Sequence[RankRecord]
) -> tuple[NDArray[np.float64], NDArray[np.int64], float]:
    """Return when each rank would have been ready by its own work, shape (ranks, steps).

    The times are on rank 0's clock, see `even_ready_s` of RankSteps.

    Only the steady steps in which all ranks communicated. Also returns the numbers of these steps,
    and the mean step in seconds; NaN without a step.
    """
    steady = steps.steady()
    rows = [steady.ranks.index(rank.rank) for rank in ranks]
    ready = steady["even_ready_s"][rows]
    common = ~np.isnan(ready).any(axis=0)
    step_s = steady["step_s"][rows][:, common]
    return ready[:, common], steady.step[common], float(step_s.mean()) if step_s.size else np.nan


def _why_none(
    late: Sequence[Lateness], ahead: Estimate | None, error_s: float, steps: int
) -> str | None:
    """Explain why the first rank is no straggler; None if it is one."""
    first, second = late[:2]
    if steps < _LEAST_STEPS or ahead is None:
        return f"{steps} steps are too few"
    both = f"ranks {first.rank} and {second.rank}"
    if ahead.value < first.delay_s.mean / 2:
        return f"{both} have similar delays"
    if ahead.low <= 0:
        return f"the delays of {both} vary too much from step to step to tell them apart"
    if first.delay_s.mean <= error_s:
        return f"the delay of rank {first.rank} is smaller than the clock error"
    if first.delay_share < _LEAST_SHARE:
        return f"rank {first.rank} is last, but its delay is below {_LEAST_SHARE:.0%} of a step"
    return None


def _with_phase(steps: RankSteps, verdict: Straggling, ranks: Sequence[RankRecord]) -> Straggling:
    """Name the phase with the largest excess of the straggler over the mean of the others."""
    by_rank = mean_steps(steps.steady())
    means = {rank.rank: mean_step(by_rank, rank.rank) for rank in ranks}
    own = means.pop(verdict.ranks[0].rank)
    excess = {
        name: value - float(np.mean([other[name] or 0.0 for other in means.values()]))
        for name, value in own.items()
        if value is not None and name not in _NOT_OWN
    }
    phase = max(excess, key=lambda name: excess[name])
    if excess[phase] <= 0:
        return verdict
    return replace(verdict, phase=phase, phase_excess_s=excess[phase])


# --- staleness of updates that were made without a barrier ---------------------------------------
#
# The staleness of an update is the number of updates of the same weights between the moment when
# the worker fetched them and the moment when its gradient is applied. Of weights in shards, every
# shard counts its own updates.

_PERCENTILE = 95


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Distribution of the staleness over all updates of a configuration."""

    updates: int  # applied, by all shards and in all repeats
    mean: float
    p95: float
    max: int
    lead_steps_max: int | None  # of a worker over the slowest one; None in a pipeline


def read_updates(record: TrialRecord) -> pl.DataFrame | None:
    """Return the rows of all ranks, with the rank that wrote each as `rank`; None without any."""
    frames = [
        read_table(record.files.rank(rank.rank).updates, UpdateRow).with_columns(
            pl.lit(rank.rank, dtype=pl.Int64).alias("rank")
        )
        for rank in record.ranks
    ]
    rows = pl.concat(frames) if frames else pl.DataFrame()
    return None if rows.is_empty() else rows


def staleness(repeats: Sequence[pl.DataFrame]) -> Staleness | None:
    """Summarise the updates of all repeats of a configuration; None without any."""
    if not repeats:
        return None
    applied = pl.concat(repeats).filter(pl.col("event") == "applied")
    values = applied["staleness"].drop_nulls().to_numpy()
    if not len(values):
        return None
    leads = applied["lead_steps"].drop_nulls()
    return Staleness(
        updates=len(values),
        mean=float(values.mean()),
        p95=float(np.percentile(values, _PERCENTILE)),
        max=int(values.max()),
        lead_steps_max=int(leads.to_numpy().max()) if len(leads) else None,
    )
