"""Divide the time of each operation: waiting and transfer, exposed and overlapped.

Waiting runs from a rank's turn to the turn of the group's last rank; transfer runs from then to the
rank's own end. Turns are compared on rank 0's clock. A wait that is shorter than the clock errors
of both ranks cannot be measured, and counts as transfer.

Exposed time lies within the step's exposed window: from this rank's last gradient being ready to
all gradients averaged (StepRow.comm_s). Overlapped time runs in parallel with computation. Where
several operations are active at once, the time counts for the one that began first. So nothing is
counted twice: the exposed times of a step's operations and the gaps between them add up to comm_s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from paceline.analysis.communication_rows import Operations
    from paceline.analysis.reading import TrialRecord

# Operations that no rank can end before all have begun: an earlier end shows a clock error.
_BLOCKING = ("allreduce", "allgather", "reduce_scatter", "alltoall", "barrier", "shared_reduce")
NO_STEP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTimes:
    """Arrays of the length of the operations; seconds.

    time_s = wait_s + transfer_s, from the turn to the end. exposed_s + overlapped_s is the same but
    for the time of operations that began earlier. wait_s and transfer_s are NaN where other ranks'
    rows are missing.
    """

    step: NDArray[np.int64]  # in which it was requested; NO_STEP outside of steps
    last_rank: NDArray[np.int64]  # the last rank to begin it
    time_s: NDArray[np.float64]
    wait_s: NDArray[np.float64]
    transfer_s: NDArray[np.float64]
    exposed_s: NDArray[np.float64]
    overlapped_s: NDArray[np.float64]


def clock_errors(record: TrialRecord, operations: Operations | None = None) -> dict[int, float]:
    """Return the largest clock error of each rank against rank 0, in seconds.

    This is the error measured at the rendezvous. It is larger where operations show that the clocks
    have drifted since: no rank can end an all-reduce before all ranks have begun it. The drift is
    at least the time by which the operation ended too early, and at most the time of both ranks in
    it more.
    """
    stated = {rank.rank: rank.clock_error_s for rank in record.ranks}
    if operations is None or not len(operations):
        return stated
    last, complete = _last_rows(operations)
    blocking = np.isin(
        operations.operation,
        [n for n, name in enumerate(operations.operations) if name in _BLOCKING],
    )
    time_s = operations.ended_s - operations.turn_s
    early_s = np.where(complete & blocking, operations.turn_s[last] - operations.ended_s, 0.0)
    for rank, error_s in stated.items():
        own = np.flatnonzero(operations.rank == rank)
        if not len(own):
            continue
        worst = own[early_s[own].argmax()]
        if early_s[worst] > error_s + stated[int(operations.rank[last[worst]])]:
            stated[rank] = float(early_s[worst] + time_s[worst] + time_s[last[worst]])
    return stated


def operation_times(
    steps: pl.DataFrame, operations: Operations, errors_s: Mapping[int, float]
) -> OperationTimes:
    """Divide the time of every operation.

    steps: from `step_table`. errors_s: of each rank's clock, from `clock_errors`.
    """
    last, complete = _last_rows(operations)
    last_rank, last_turn = operations.rank[last], operations.turn_s[last]
    time_s = operations.ended_s - operations.turn_s
    error_s = _each(operations.rank, errors_s) + _each(last_rank, errors_s)
    late_s = last_turn - operations.turn_s
    # a rank that begins after the end was not waited for, or the clocks are wrong
    claimed = np.where((late_s > error_s) & (late_s < time_s), late_s, 0.0)
    wait_s = np.where(complete, claimed, np.nan)
    step, opened, closed = _windows(steps, operations)
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
    """Return, for each row, the row of the last rank of the same operation.

    Also returns a mask of the rows whose operation has the rows of all its ranks.
    """
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
    table: pl.DataFrame, operations: Operations
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Return, for each row, its step, and the start and end of the step's exposed window.

    Where there is none, the window is empty. table: from `step_table`.
    """
    step = np.full(len(operations), NO_STEP, dtype=np.int64)
    opened, closed = np.full(len(operations), np.inf), np.full(len(operations), -np.inf)
    for rank in np.unique(operations.rank):
        own = np.flatnonzero(operations.rank == rank)
        rows = table.filter(pl.col("rank") == rank).sort("started_s")
        steps, started, ended, ready, communicated = (
            rows[name].to_numpy() for name in ("step", "started_s", "ended_s", "ready_s", "comm_s")
        )
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


def _each(ranks: NDArray[np.int64], values: Mapping[int, float]) -> NDArray[np.float64]:
    """Look up the value of each rank in `ranks`; 0 for an unknown rank."""
    table = np.zeros(max(int(ranks.max(initial=0)), *values, 0) + 1)
    for rank, value in values.items():
        table[rank] = value
    looked_up: NDArray[np.float64] = table[ranks]
    return looked_up
