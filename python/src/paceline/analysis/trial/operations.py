"""Operations of all ranks in one frame, and where their time went.

Waiting runs from a rank's turn to the turn of the group's last rank; transfer runs from then to the
rank's own end. Turns are compared on rank 0's clock. A wait that is shorter than the clock errors
of both ranks cannot be measured, and counts as transfer.

Exposed time lies within the step's exposed window: from this rank's last gradient being ready to
the end of the communication after it (StepRow.comm_s). Where the rank computes between two
operations, as with ZeRO-1, both lie within the window, and it computes during none of them.
Overlapped time runs in parallel with computation. Where several operations are active at once, the
time counts for the one that began first. So nothing is counted twice: the exposed times of a step's
operations and the gaps between them add up to comm_s.
An operation that the rank awaited within a pass is exposed, too: its time there is a part of
StepRow.pass_comm_s.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from paceline.analysis.trial.reading import RankRecord, TrialRecord
from paceline.analysis.trial.steps import RankSteps
from paceline.measure.records.rows import CommunicationRow
from paceline.measure.records.tables import read_table

# Operations that no rank can end before all have begun: an earlier end shows a clock error.
_BLOCKING = ("allreduce", "allgather", "reduce_scatter", "alltoall", "barrier", "shared_reduce")
_SAME = ("group", "operation", "sequence")  # equal on all ranks of one operation


def load_operations(record: TrialRecord) -> pl.DataFrame:
    """Read the operations of all ranks, by rank and turn; no rows if none was recorded.

    Columns: rank, group, operation, algorithm (null where there was no choice), ranks (of the
    group), sequence, payload_bytes, sent_bytes, sent_messages (null where the transport does not
    count), awaited; asked_s, turn_s, ended_s: unix seconds on rank 0's clock; time_s: from turn
    to end.
    `turn_s` is when the operation could begin for this rank: when it was requested, or, where the
    operations of a group queue, when the earlier ones were done.
    last_rank, last_turn_s, last_time_s: of the last rank to begin the same operation; is_complete:
    all ranks of the group recorded it.

    Raises DataError if a file is damaged.
    """
    parts = [
        _on_one_clock(
            rank, read_table(record.files.rank(rank.rank).communication, CommunicationRow)
        )
        for rank in record.ranks
    ]
    by_turn = {
        f"last_{name}": pl.col(name).sort_by("turn_s", maintain_order=True).last().over(_SAME)
        for name in ("rank", "turn_s", "time_s")
    }
    is_complete = pl.len().over(_SAME) == pl.col("ranks")
    ordered = pl.concat(parts).sort("rank", "turn_s", maintain_order=True)
    return ordered.with_columns(**by_turn, is_complete=is_complete)


def clock_errors(record: TrialRecord, operations: pl.DataFrame | None = None) -> dict[int, float]:
    """Return the largest clock error of each rank against rank 0, in seconds.

    This is the error measured at the rendezvous. It is larger where operations show that the clocks
    have drifted since: no rank can end an all-reduce before all ranks have begun it. The drift is
    at least the time by which the operation ended too early. It is at most that time plus the
    time that both ranks spent in the operation.
    """
    errors_s = {rank.rank: rank.clock_error_s for rank in record.ranks}
    if operations is None:
        return errors_s
    earliest_ends = (
        operations.filter(pl.col("is_complete"), pl.col("operation").is_in(_BLOCKING))
        .select(
            "rank",
            "last_rank",
            (pl.col("last_turn_s") - pl.col("ended_s")).alias("early_s"),
            (pl.col("time_s") + pl.col("last_time_s")).alias("both_s"),
        )
        .sort("early_s", descending=True, maintain_order=True)
        .unique("rank", keep="first", maintain_order=True)
        .sort("rank")
    )
    for rank, last_rank, early_s, both_s in earliest_ends.iter_rows():
        if early_s > errors_s[rank] + errors_s[last_rank]:
            errors_s[rank] = early_s + both_s
    return errors_s


def operation_times(
    steps: RankSteps, operations: pl.DataFrame, errors_s: Mapping[int, float]
) -> pl.DataFrame:
    """Add to `operations` their step and the division of their time, in seconds.

    step: in which it was requested; null outside of steps. wait_s + transfer_s = time_s; null where
    other ranks' rows are missing. exposed_s + overlapped_s = time_s as well, unless an earlier
    operation still ran: time in which both ran counts for the earlier one. after_passes_s: the part
    of exposed_s within StepRow.comm_s.

    errors_s: of each rank's clock, from `clock_errors`.
    """
    turn, ended = pl.col("turn_s"), pl.col("ended_s")
    error = sum(
        pl.col(name).replace_strict(errors_s, default=0.0, return_dtype=pl.Float64)
        for name in ("rank", "last_rank")
    )
    late = pl.col("last_turn_s") - turn
    # a rank that begins after the end was not waited for, or the clocks are wrong
    wait = pl.when((late > error) & (late < pl.col("time_s"))).then(late).otherwise(0.0)
    # from when no operation that began earlier is active
    alone_from = pl.max_horizontal(turn, ended.cum_max().shift(1).over("rank"))
    exposed = pl.min_horizontal(ended, "closed_s") - pl.max_horizontal("alone_from_s", "opened_s")
    return (
        operations.with_columns(
            pl.when("is_complete").then(wait).alias("wait_s"), alone_from.alias("alone_from_s")
        )
        .with_row_index("place")
        .sort("asked_s")
        .join_asof(
            _windows(steps),
            left_on="asked_s",
            right_on="started_s",
            by="rank",
            check_sortedness=False,  # Polars cannot check it within groups
        )
        .sort("place")
        .with_columns(
            pl.when(pl.col("asked_s") < pl.col("step_ended_s")).then(pl.col(name)).alias(name)
            for name in ("step", "opened_s", "closed_s")
        )
        .with_columns(
            (pl.col("time_s") - pl.col("wait_s")).alias("transfer_s"),
            pl.when(pl.col("opened_s").is_not_null())
            .then(exposed.clip(0.0))
            .otherwise(0.0)
            .alias("after_passes_s"),
        )
        .with_columns(
            pl.when("awaited")
            .then((ended - pl.col("alone_from_s")).clip(0.0))
            .otherwise("after_passes_s")
            .alias("exposed_s")
        )
        .with_columns(overlapped_s=(ended - pl.col("alone_from_s")).clip(0.0) - pl.col("exposed_s"))
    )


def _on_one_clock(rank: RankRecord, rows: pl.DataFrame) -> pl.DataFrame:
    asked, started, ended = (
        pl.col(name) + rank.clock_offset_s
        for name in ("arrived_unix_s", "started_unix_s", "ended_unix_s")
    )
    turn = pl.max_horizontal(asked, started)
    return rows.select(
        pl.lit(rank.rank, dtype=pl.Int64).alias("rank"),
        *("group", "operation", "algorithm", "ranks", "sequence", "payload_bytes"),
        *("sent_bytes", "sent_messages"),
        pl.col("awaited").fill_null(value=False),
        asked.alias("asked_s"),
        turn.alias("turn_s"),
        pl.max_horizontal(turn, ended).alias("ended_s"),
    ).with_columns((pl.col("ended_s") - pl.col("turn_s")).alias("time_s"))


def _windows(steps: RankSteps) -> pl.DataFrame:
    """Return start and end of each rank's steps and of their exposed windows, by time.

    The window is null where the rank did not communicate.
    """
    parts = [
        steps.of_rank(rank).select(
            "step",
            "started_s",
            pl.col("ended_s").alias("step_ended_s"),
            pl.col("ready_s").alias("opened_s"),
            pl.col("comm_ended_s").alias("closed_s"),
            pl.lit(rank, dtype=pl.Int64).alias("rank"),
        )
        for rank in steps.ranks
    ]
    return pl.concat(parts).sort("started_s")
