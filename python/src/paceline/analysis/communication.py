"""Where the communication time of a trial went: by rank, by operation and size, and who was late.

Two views that must agree. By steps: waiting for the slowest rank and transfer, which add up to
comm_s (paceline.analysis.phases), and the phases of a step, which add up to the step. By
operations: what each rank asked for, when all had come, when it ended
(paceline.analysis.communication_times). `checks` compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.analysis.communication_bins import bins
from paceline.analysis.communication_rows import load_operations
from paceline.analysis.communication_times import NO_STEP, clock_errors, operation_times
from paceline.analysis.phases import communication_waits, mean_step
from paceline.analysis.steps import rows_by_step
from paceline.analysis.stragglers import find_straggler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.analysis.communication_bins import Bin
    from paceline.analysis.communication_rows import Operations
    from paceline.analysis.communication_times import OperationTimes
    from paceline.analysis.phases import Phases
    from paceline.analysis.reading import RankRecord, TrialRecord
    from paceline.analysis.stragglers import Straggling

SCHEMA = 1
_ALLOWED = 0.02  # of a step: by how much sums may differ
_COMMUNICATION = ("comm_wait", "comm_transfer")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommunication:
    """One rank's mean step after the warm-up, in seconds.

    phases: by analysis.phases.STEP_PHASES. These are None where no operation was recorded:
    overlapped_s, in which an operation was under way beside computation; exposed_s, in which one
    was within comm_s; between_s, the rest of comm_s.
    """

    rank: int
    host: str | None
    clock_offset_s: float
    clock_error_s: float
    steps: int
    step_s: float
    wall_s: float  # of the same steps by the clock, first start to last end, over their number
    phases: Phases
    overlapped_s: float | None
    exposed_s: float | None
    between_s: float | None
    bins: tuple[Bin, ...]  # after the warm-up
    totals: tuple[Bin, ...]  # of all operations, in steps or not

    @property
    def comm_s(self) -> float | None:
        found = [self.phases[name] for name in _COMMUNICATION]
        return None if None in found else sum(v for v in found if v is not None)

    @property
    def compute_s(self) -> float:
        """All phases but communication and a stage's waiting for its neighbours."""
        apart = (*_COMMUNICATION, "bubble")
        return sum(v for name, v in self.phases.items() if name not in apart and v is not None)

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "host": self.host,
            "clock_offset_s": self.clock_offset_s,
            "clock_error_s": self.clock_error_s,
            "steps": self.steps,
            "step_s": self.step_s,
            "wall_s": self.wall_s,
            "compute_s": self.compute_s,
            "comm_s": self.comm_s,
            "phases_s": self.phases,
            "overlapped_s": self.overlapped_s,
            "exposed_s": self.exposed_s,
            "between_s": self.between_s,
            "bins": [each.to_json() for each in self.bins],
            "totals": [each.to_json() for each in self.totals],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Two sums that should be equal: the largest difference of any rank, as a share of its step."""

    name: str
    difference: float
    allowed: float

    @property
    def passed(self) -> bool:
        return abs(self.difference) <= self.allowed

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "difference": self.difference,
            "allowed": self.allowed,
            "passed": self.passed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCommunication:
    """A trial's communication. Bins are sums over all ranks and the steps after the warm-up."""

    trial_id: str
    configuration: str
    repeat: int
    transport: str
    ranks: tuple[RankCommunication, ...]
    recorded: bool  # whether operations were; else only what steps say is known
    bins: tuple[Bin, ...]
    totals: tuple[Bin, ...]  # of the whole trial
    straggling: tuple[Straggling, ...]  # one; in a pipeline one for each stage
    checks: tuple[Check, ...]

    @property
    def clock_error_s(self) -> float:
        """The largest error of a comparison between two ranks' times."""
        errors = sorted(rank.clock_error_s for rank in self.ranks)
        return sum(errors[-2:])

    def to_json(self) -> dict[str, Any]:
        return {
            "trial": self.trial_id,
            "configuration": self.configuration,
            "repeat": self.repeat,
            "transport": self.transport,
            "operations_recorded": self.recorded,
            "clock_error_s": self.clock_error_s,
            "ranks": [rank.to_json() for rank in self.ranks],
            "bins": [each.to_json() for each in self.bins],
            "totals": [each.to_json() for each in self.totals],
            "stragglers": [each.to_json() for each in self.straggling],
            "checks": [check.to_json() for check in self.checks],
        }


def trial_communication(record: TrialRecord) -> TrialCommunication | None:
    """None if no step of the trial communicated after the warm-up.

    Raises DataError if a file is damaged.
    """
    warmup = record.trial.training.warmup_steps
    steady = [row for r in record.ranks for row in r.steps if row.step >= warmup]
    if not any(row.comm_s is not None for row in steady):
        return None
    operations = load_operations(record)
    errors_s = clock_errors(record, operations)
    times = None if operations is None else operation_times(record, operations, errors_s)
    waits = communication_waits(record)
    ranks = tuple(
        _rank(record, rank, waits[rank.rank], errors_s, operations, times)
        for rank in record.ranks
        if any(row.step >= warmup for row in rank.steps)
    )
    whole: tuple[Bin, ...] = ()
    after: tuple[Bin, ...] = ()
    if operations is not None and times is not None:
        everything = np.ones(len(operations), dtype=bool)
        whole = bins(operations, times, everything, all_ranks=True)
        after = bins(operations, times, _steady(times, warmup), all_ranks=True)
    return TrialCommunication(
        trial_id=record.trial.id,
        configuration=record.trial.configuration,
        repeat=record.trial.repeat,
        transport=record.trial.transport,
        ranks=ranks,
        recorded=operations is not None and len(operations) > 0,
        bins=after,
        totals=whole,
        straggling=find_straggler(record, errors_s),
        checks=_checks(ranks),
    )


def _steady(times: OperationTimes, warmup: int) -> Any:
    return (times.step >= warmup) & (times.step != NO_STEP)


def _rank(
    record: TrialRecord,
    rank: RankRecord,
    waits: Mapping[int, float],
    errors_s: Mapping[int, float],
    operations: Operations | None,
    times: OperationTimes | None,
) -> RankCommunication:
    warmup = record.trial.training.warmup_steps
    rows = [row for row in rows_by_step(rank).values() if row.step >= warmup]
    phases = mean_step(rank, waits, warmup)
    overlapped_s = exposed_s = between_s = None
    own_bins: tuple[Bin, ...] = ()
    totals: tuple[Bin, ...] = ()
    if operations is not None and times is not None and len(operations):
        own = operations.rank == rank.rank
        steady = own & _steady(times, warmup)
        exposed_s = float(times.exposed_s[steady].sum()) / len(rows)
        overlapped_s = float(times.overlapped_s[steady].sum()) / len(rows)
        between_s = sum(row.comm_s or 0.0 for row in rows) / len(rows) - exposed_s
        own_bins = bins(operations, times, steady, all_ranks=False)
        totals = bins(operations, times, own, all_ranks=False)
    started = min(row.started_unix_s for row in rows)
    ended = max(row.started_unix_s + row.step_s for row in rows)
    return RankCommunication(
        rank=rank.rank,
        host=rank.host,
        clock_offset_s=rank.clock_offset_s,
        clock_error_s=errors_s[rank.rank],
        steps=len(rows),
        step_s=sum(row.step_s for row in rows) / len(rows),
        wall_s=(ended - started) / len(rows),
        phases=phases,
        overlapped_s=overlapped_s,
        exposed_s=exposed_s,
        between_s=between_s,
        bins=own_bins,
        totals=totals,
    )


def _checks(ranks: tuple[RankCommunication, ...]) -> tuple[Check, ...]:
    """Whether phases add up to the clock's time, and operations to the communication in it."""
    phases = [sum(v for v in r.phases.values() if v is not None) / r.wall_s - 1 for r in ranks]
    found = [("phases add up to the step's time by the clock", phases)]
    profiled = [
        (r.wall_s - r.compute_s - (r.phases["bubble"] or 0.0) - r.exposed_s) / r.wall_s
        for r in ranks
        if r.exposed_s is not None
    ]
    if profiled:
        found.append(("computation and exposed operations do", profiled))
    return tuple(
        Check(name=name, difference=max(differences, key=abs), allowed=_ALLOWED)
        for name, differences in found
    )
