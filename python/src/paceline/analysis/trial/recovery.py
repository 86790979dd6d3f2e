"""The cost of each failure after which a trial continued: lost work, and time until the next step.

    last step of the attempt before ... detected ... new processes ... state restored ... next step

Where the run itself has caused a failure, its moment is recorded. Otherwise it is taken as the end
of the last step that any rank finished, which is at most one step too early.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from paceline.analysis.trial.phases import median_of
from paceline.analysis.trial.reading import TrialRecord
from paceline.analysis.trial.steps import RankSteps
from paceline.measure.records.rows import (
    CheckpointRow,
    ContinuationRow,
    FailureRow,
    InjectedFailureRow,
)
from paceline.measure.records.tables import rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One failure and what followed. Times in seconds; None where nothing was recorded.

    detect_s + restart_s + restore_s + next_step_s is the time from the last step before the failure
    to the end of the first new step.
    """

    kind: str | None  # of a failure that the run caused: rank, executor or host
    failed_rank: int | None
    steps_done: int  # before the failure
    resumed_steps: int  # from which the training continued
    lost_work_s: float | None  # time that the repeated steps had taken
    detect_s: float | None  # from the last step to the moment when the failure was noticed
    restart_s: float | None  # from then to the first new process
    restore_s: float  # from then until the state was restored: imports, data, checkpoint
    next_step_s: float | None  # from then to the end of the first new step

    @property
    def lost_steps(self) -> int:
        return self.steps_done - self.resumed_steps

    @property
    def total_s(self) -> float | None:
        """The time that the failure cost: until the next step, and the repeated work."""
        parts = (self.detect_s, self.restart_s, self.next_step_s, self.lost_work_s)
        known = [part for part in parts if part is not None]
        return sum(known) + self.restore_s if len(known) == len(parts) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCost:
    """Cost of a failure of a kind under a configuration: medians over them, in seconds."""

    configuration: str
    kind: str | None  # None: the run did not cause them
    failures: int
    lost_steps: float
    lost_work_s: float | None
    detect_s: float | None
    restart_s: float | None
    restore_s: float
    next_step_s: float | None
    checkpoint_s: float  # by which a checkpoint delays the training

    @property
    def downtime_s(self) -> float:
        """From a failure to the first new step, without the repeated work."""
        parts = (self.detect_s, self.restart_s, self.next_step_s)
        return self.restore_s + sum(part for part in parts if part is not None)


def recovery_values(recovery: Recovery) -> dict[str, float | int | None]:
    """Return a recovery as a row of `paceline compare --json`."""
    own = dataclasses.asdict(recovery)
    return {**own, "lost_steps": recovery.lost_steps, "total_s": recovery.total_s}


def recoveries(record: TrialRecord, steps: RankSteps) -> tuple[Recovery, ...]:
    """Return the failures of a trial in order of time; () if none was survived."""
    by_rank = [rank.continuations for rank in record.ranks]
    number = min((len(each) for each in by_rank), default=0)
    failures = rows(record.files.failures, FailureRow)
    injected = rows(record.files.injected, InjectedFailureRow)
    starts = [[each[index] for each in by_rank] for index in range(number)]
    restored = [0.0, *(max(row.restored_unix_s for row in ranks) for ranks in starts)]
    began = [*(min(row.process_started_unix_s for row in ranks) for ranks in starts), math.inf]
    return tuple(
        _recovery(ranks, failures, injected, steps, restored[index], began[index + 1])
        for index, ranks in enumerate(starts)
    )


def checkpoint_delay_s(record: TrialRecord) -> float | None:
    """Return the median time by which a checkpoint blocked the slowest rank; None without any."""
    by_rank = [
        rows(record.files.rank(rank.rank).checkpoints, CheckpointRow) for rank in record.ranks
    ]
    written = ([row.blocked_s for row in each if row.error is None] for each in by_rank)
    blocked_s = [max(each) for each in zip(*written, strict=False)]
    return median(blocked_s) if blocked_s else None


def failure_costs(
    configuration: str, survived: Sequence[Recovery], blocked_s: Sequence[float]
) -> list[FailureCost]:
    """Return the cost of each kind of the failures that a configuration survived.

    blocked_s: the time by which a checkpoint delays each of its trials.
    """
    checkpoint_s = median(blocked_s) if blocked_s else 0.0
    return [
        _cost([each for each in survived if each.kind == kind], configuration, checkpoint_s)
        for kind in dict.fromkeys(each.kind for each in survived)
    ]


def _cost(failures: Sequence[Recovery], configuration: str, checkpoint_s: float) -> FailureCost:
    """Return the cost of failures of one kind. failures: at least one."""
    return FailureCost(
        configuration=configuration,
        kind=failures[0].kind,
        failures=len(failures),
        lost_steps=median(each.lost_steps for each in failures),
        lost_work_s=median_of(each.lost_work_s for each in failures),
        detect_s=median_of(each.detect_s for each in failures),
        restart_s=median_of(each.restart_s for each in failures),
        restore_s=median(each.restore_s for each in failures),
        next_step_s=median_of(each.next_step_s for each in failures),
        checkpoint_s=checkpoint_s,
    )


def _recovery(
    ranks: Sequence[ContinuationRow],
    failures: Sequence[FailureRow],
    injected: Sequence[InjectedFailureRow],
    steps: RankSteps,
    since_unix_s: float,
    until_unix_s: float,
) -> Recovery:
    """Return one recovery.

    since_unix_s: when the training had continued after the failure before. until_unix_s: start of
    the processes after the next failure.
    """
    last_ended = max((r.before_ended_unix_s for r in ranks if r.before_ended_unix_s), default=None)
    started = min(row.process_started_unix_s for row in ranks)
    restored = max(row.restored_unix_s for row in ranks)
    resumed = ranks[0].resumed_steps
    begin = max(last_ended or 0.0, since_unix_s)
    failure = next((f for f in failures if begin <= f.detected_unix_s <= started), None)
    if failure is not None:
        detected: float | None = failure.detected_unix_s
    else:  # torchrun's agent: the first rank that noticed it wrote so
        noticed = [r.before_state_unix_s for r in ranks if r.before_state == "failed"]
        detected = min((time for time in noticed if time is not None), default=None)
    caused = [row for row in injected if since_unix_s <= row.unix_s <= (detected or started)]
    failed_rank = caused[-1].rank if caused else None
    if failure is not None and failed_rank is None:
        failed_rank = failure.failed_rank
    failed = caused[-1].unix_s if caused else last_ended
    next_ended = _ended(steps, resumed)
    if next_ended is not None and next_ended > until_unix_s:
        next_ended = None  # the step was repeated once more
    before = _ended(steps, resumed - 1) if resumed else None
    if before is not None:
        before = max(before, since_unix_s)
    return Recovery(
        kind=caused[-1].kind if caused else None,
        failed_rank=failed_rank,
        steps_done=max(row.before_steps for row in ranks),
        resumed_steps=resumed,
        lost_work_s=_between(before, last_ended),
        detect_s=_between(failed, detected),
        restart_s=_between(detected, started),
        restore_s=restored - started,
        next_step_s=_between(restored, next_ended),
    )


def _ended(steps: RankSteps, step: int) -> float | None:
    """Return when the last rank ended a step; None if it is not recorded."""
    place = np.flatnonzero(steps.step == step)
    if not len(place):
        return None
    ended = steps["ended_s"][:, place[0]]
    return None if np.isnan(ended).any() else float(ended.max())


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)
