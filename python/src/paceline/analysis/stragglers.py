"""Who makes the others wait: all-reduce makes every rank equally slow, but not equally late.

A step's communication cannot end before the last rank's gradients are ready. What a rank costs is
how much earlier that would have been, had it been ready with the last of the others: 0 for all but
the last. Its mean over the steps is the rank's loss, in seconds a step. A rank is named if its loss
is at least twice the next one's, by more than chance over steps, more than the clocks may be off,
and enough of a step to matter; else nobody stands out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.analysis.phases import communication_waits, mean_step
from paceline.analysis.ranks import stage_of
from paceline.analysis.statistics import mean_interval
from paceline.analysis.steps import rows_by_step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from paceline.analysis.reading import RankRecord, TrialRecord
    from paceline.analysis.statistics import Mean

_LEAST_SHARE = 0.01  # of a step: what costs less is not worth a name
_LEAST_STEPS = 5  # for a claim
_SURE = (
    0.99  # that the first costs more than the second: every profile asks, most have no straggler
)
_NOT_OWN = ("comm_wait", "comm_transfer", "bubble")  # phases in which a rank waits for others


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """How late one rank came to the steps' communication."""

    rank: int
    host: str | None
    last_share: float  # of the steps: in which it came last
    loss_s: Mean  # what the others would have been spared, a step
    loss_share: float  # of the step

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "host": self.host,
            "last_share": self.last_share,
            "loss_s": self.loss_s.to_json(),
            "loss_share": self.loss_share,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggling:
    """Who stands out among the ranks that average with one another, if anybody does."""

    stage: int | None  # None without a pipeline
    steps: int
    ranks: tuple[Lateness, ...]  # the costliest first
    straggler: int | None
    reason: str  # why nobody is named; "" if somebody is
    error_s: float  # of comparing the clocks of the first two
    phase: str | None  # in which the straggler spends more than the others
    phase_excess_s: float | None  # how much more, a step

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "steps": self.steps,
            "straggler": self.straggler,
            "reason": self.reason or None,
            "clock_error_s": self.error_s,
            "phase": self.phase,
            "phase_excess_s": self.phase_excess_s,
            "ranks": [rank.to_json() for rank in self.ranks],
        }


def find_straggler(record: TrialRecord, errors_s: Mapping[int, float]) -> tuple[Straggling, ...]:
    """One verdict; of a pipeline, one for each stage that has several replicas.

    errors_s: of each rank's clock.
    """
    stages: dict[int, list[RankRecord]] = {}
    for rank in record.ranks:
        stages.setdefault(stage_of(record.trial, rank), []).append(rank)
    return tuple(
        _among(record, ranks, errors_s, stage if record.trial.stages > 1 else None)
        for stage, ranks in sorted(stages.items())
        if len(ranks) > 1
    )


def _among(
    record: TrialRecord,
    ranks: Sequence[RankRecord],
    errors_s: Mapping[int, float],
    stage: int | None,
) -> Straggling:
    ready, _, step_s = ready_times(record, ranks)
    costs = costs_of(ready)
    key = f"{record.trial.id} {stage}"
    found = []
    for number, rank in enumerate(ranks):
        loss = mean_interval(costs[number], f"{key} {rank.rank}")
        if loss is not None:
            found.append(
                Lateness(
                    rank=rank.rank,
                    host=rank.host,
                    last_share=float(np.mean(ready.argmax(axis=0) == number)),
                    loss_s=loss,
                    loss_share=loss.mean / step_s,
                )
            )
    late = sorted(found, key=lambda each: -each.loss_s.mean)
    if not late:
        return _verdict(stage, 0, (), 0.0, "no step in which all of them communicated")
    numbers = {rank.rank: number for number, rank in enumerate(ranks)}
    first, second = (numbers[each.rank] for each in late[:2])
    error_s = errors_s[late[0].rank] + errors_s[late[1].rank]
    ahead = mean_interval(costs[first] - costs[second], f"{key} ahead", _SURE)
    reason = _why_none(late, ahead, error_s, ready.shape[1])
    verdict = _verdict(stage, ready.shape[1], tuple(late), error_s, reason)
    return verdict if reason else _with_phase(record, verdict, ranks)


def costs_of(ready: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much earlier all would have been ready without waiting for each rank, by step.

    ready: on one clock, shape (ranks, steps), at least two ranks. Same shape: positive for the
    last rank of a step, 0 for the others.
    """
    ordered = np.sort(ready, axis=0)
    gap = ordered[-1] - ordered[-2]
    last = np.arange(len(ready))[:, None] == ready.argmax(axis=0)
    costs: NDArray[np.float64] = np.where(last, gap, 0.0)
    return costs


def ready_times(
    record: TrialRecord, ranks: Sequence[RankRecord]
) -> tuple[NDArray[np.float64], list[int], float]:
    """When each rank was ready, on rank 0's clock, in the steps after the warm-up that all have,
    shape (ranks, steps); which steps these are; and the mean step in seconds."""
    warmup = record.trial.training.warmup_steps
    rows = [
        {
            step: row
            for step, row in rows_by_step(rank).items()
            if step >= warmup and row.comm_ready_unix_s is not None
        }
        for rank in ranks
    ]
    steps = sorted(set.intersection(*(set(own) for own in rows)))
    ready = np.array(
        [
            [(own[step].comm_ready_unix_s or 0.0) + rank.clock_offset_s for step in steps]
            for own, rank in zip(rows, ranks, strict=True)
        ]
    )
    step_s = float(np.mean([own[step].step_s for own in rows for step in steps] or [np.nan]))
    return ready.reshape(len(ranks), len(steps)), steps, step_s


def _why_none(late: Sequence[Lateness], ahead: Mean | None, error_s: float, steps: int) -> str:
    """Why the first is no straggler; "" if it is one."""
    first, second = late[:2]
    if steps < _LEAST_STEPS or ahead is None:
        return f"{steps} steps are too few to tell"
    both = f"ranks {first.rank} and {second.rank}"
    if ahead.low <= 0 or ahead.mean < first.loss_s.mean / 2:
        return f"{both} are the last about as often and as late as each other"
    if first.loss_s.mean <= error_s:
        return f"rank {first.rank} is late by less than the clocks may be off"
    if first.loss_share < _LEAST_SHARE:
        return f"rank {first.rank} is the latest, at less than {_LEAST_SHARE:.0%} of a step"
    return ""


def _verdict(
    stage: int | None, steps: int, late: tuple[Lateness, ...], error_s: float, reason: str
) -> Straggling:
    return Straggling(
        stage=stage,
        steps=steps,
        ranks=late,
        straggler=None if reason else late[0].rank,
        reason=reason,
        error_s=error_s,
        phase=None,
        phase_excess_s=None,
    )


def _with_phase(
    record: TrialRecord, verdict: Straggling, ranks: Sequence[RankRecord]
) -> Straggling:
    """Name the phase in which the straggler spends most more than the mean of the others."""
    waits, warmup = communication_waits(record), record.trial.training.warmup_steps
    means = {rank.rank: mean_step(rank, waits[rank.rank], warmup) for rank in ranks}
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
