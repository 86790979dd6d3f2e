"""Of each operation: waiting against transfer, and exposed against overlapped time.

Waiting is from a rank's turn to the turn of the group's last rank; transfer is from then to the
rank's own end. Turns are compared on rank 0's clock, so a wait is known to within both ranks' clock
errors; one that is shorter is not claimed, and counts as transfer.

Exposed is what lies within the step's exposed window, from this rank's last gradient being ready to
all gradients averaged (StepRow.comm_s); overlapped is what lies beside computation. Where several
operations are under way at once, that time is the one's that began first, so that nothing is
counted twice: the exposed times of a step's operations, and what lies between them, add up to its
comm_s, and the overlapped ones are never more than the computation that they run beside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from paceline.analysis.communication_rows import Operations
    from paceline.analysis.reading import RankRecord, TrialRecord

# Operations that no rank can end before the last has come: what ends earlier betrays the clocks.
_MEETINGS = ("allreduce", "allgather", "reduce_scatter", "alltoall", "barrier", "shared_reduce")
NO_STEP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTimes:
    """Arrays of the length of the operations; seconds.

    time_s = wait_s + transfer_s, from the turn to the end. exposed_s + overlapped_s is the same but
    for the time of operations that began earlier. wait_s and transfer_s are NaN where other ranks'
    rows are missing.
    """

    step: NDArray[np.int64]  # in which it was asked for; NO_STEP before, between and after
    last_rank: NDArray[np.int64]  # who came last to it
    time_s: NDArray[np.float64]
    wait_s: NDArray[np.float64]
    transfer_s: NDArray[np.float64]
    exposed_s: NDArray[np.float64]
    overlapped_s: NDArray[np.float64]


def clock_errors(record: TrialRecord, operations: Operations | None = None) -> dict[int, float]:
    """How far each rank's times may be off rank 0's clock.

    What was stated when the ranks met; more where operations show that clocks have moved since: no
    rank can end an all-reduce before all have come to it. One that seems to bounds the move from
    both sides: at least as much as it ends too early, at most both ranks' time in it more.
    """
    stated = {rank.rank: rank.clock_error_s for rank in record.ranks}
    if operations is None or not len(operations):
        return stated
    last, complete = _last_rows(operations)
    meets = np.isin(
        operations.operation,
        [n for n, name in enumerate(operations.operations) if name in _MEETINGS],
    )
    time_s = operations.ended_s - operations.turn_s
    early_s = np.where(complete & meets, operations.turn_s[last] - operations.ended_s, 0.0)
    for rank, error_s in stated.items():
        own = np.flatnonzero(operations.rank == rank)
        if not len(own):
            continue
        worst = own[early_s[own].argmax()]
        if early_s[worst] > error_s + stated[int(operations.rank[last[worst]])]:
            stated[rank] = float(early_s[worst] + time_s[worst] + time_s[last[worst]])
    return stated


def operation_times(
    record: TrialRecord, operations: Operations, errors_s: Mapping[int, float]
) -> OperationTimes:
    """errors_s: of each rank's clock, from `clock_errors`."""
    last, complete = _last_rows(operations)
    last_rank, last_turn = operations.rank[last], operations.turn_s[last]
    time_s = operations.ended_s - operations.turn_s
    error_s = _each(operations.rank, errors_s) + _each(last_rank, errors_s)
    late_s = last_turn - operations.turn_s
    # who comes after the end was not waited for, or the clocks are wrong
    claimed = np.where((late_s > error_s) & (late_s < time_s), late_s, 0.0)
    wait_s = np.where(complete, claimed, np.nan)
    step, opened, closed = _windows(record, operations)
    alone_from = operations.turn_s.copy()  # from when no operation that began earlier is under way
    for rank in np.unique(operations.rank):
        own = np.flatnonzero(operations.rank == rank)
        earlier = np.maximum.accumulate(operations.ended_s[own])[:-1]
        alone_from[own[1:]] = np.maximum(alone_from[own[1:]], earlier)
    alone_s = np.maximum(0.0, operations.ended_s - alone_from)
    begin, end = np.maximum(alone_from, opened), np.minimum(operations.ended_s, closed)
    exposed_s = np.maximum(0.0, end - begin)
    return OperationTimes(
        step=step,
        last_rank=last_rank,
        time_s=time_s,
        wait_s=wait_s,
        transfer_s=time_s - wait_s,
        exposed_s=exposed_s,
        overlapped_s=alone_s - exposed_s,
    )


def _last_rows(operations: Operations) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each row: the row of the rank that came last to the same operation, and whether the rows
    of all its ranks are there."""
    order = np.lexsort(
        (operations.turn_s, operations.sequence, operations.operation, operations.group)
    )
    keys = np.stack([operations.group, operations.operation, operations.sequence])[:, order]
    first = np.r_[True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)]
    number = np.cumsum(first) - 1
    counts = np.bincount(number)
    last = order[np.r_[np.flatnonzero(first)[1:], len(order)] - 1][number]
    unsorted = np.empty_like(order)
    unsorted[order] = np.arange(len(order))
    last = last[unsorted]
    complete = counts[number][unsorted] == operations.ranks
    return last, complete


def _windows(
    record: TrialRecord, operations: Operations
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """For each row: its step, and when that step's exposed window opened and closed.

    An empty window, which nothing lies in, where there is none.
    """
    step = np.full(len(operations), NO_STEP, dtype=np.int64)
    opened, closed = np.full(len(operations), np.inf), np.full(len(operations), -np.inf)
    for rank in record.ranks:
        own = np.flatnonzero(operations.rank == rank.rank)
        steps, started, ended, ready, communicated = _step_columns(rank)
        if not len(own) or not len(steps):
            continue
        place = np.searchsorted(started, operations.asked_s[own], side="right") - 1
        inside = (place >= 0) & (operations.asked_s[own] < ended[place])
        own, place = own[inside], place[inside]
        step[own] = steps[place]
        known = ~np.isnan(ready[place])
        opened[own[known]] = ready[place[known]]
        closed[own[known]] = (ready + communicated)[place[known]]
    return step, opened, closed


def _step_columns(
    rank: RankRecord,
) -> tuple[
    NDArray[np.int64],
    NDArray[np.float64],
    NDArray[np.float64],
    NDArray[np.float64],
    NDArray[np.float64],
]:
    """Step, start, end, last gradient's being ready, and comm_s, by start; on rank 0's clock."""
    rows = sorted(rank.steps, key=lambda row: row.started_unix_s)
    offset_s = rank.clock_offset_s
    started = np.array([row.started_unix_s + offset_s for row in rows])
    ready = [np.nan if (r := row.comm_ready_unix_s) is None else r + offset_s for row in rows]
    communicated = [np.nan if row.comm_s is None else row.comm_s for row in rows]
    return (
        np.array([row.step for row in rows], dtype=np.int64),
        started,
        started + np.array([row.step_s for row in rows]),
        np.array(ready),
        np.array(communicated),
    )


def _each(ranks: NDArray[np.int64], values: Mapping[int, float]) -> NDArray[np.float64]:
    """The value of each rank in `ranks`; 0 for one that is not known."""
    table = np.zeros(max(int(ranks.max(initial=0)), *values, 0) + 1)
    for rank, value in values.items():
        table[rank] = value
    looked_up: NDArray[np.float64] = table[ranks]
    return looked_up
