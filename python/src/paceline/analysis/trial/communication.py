"""Communication time of a trial: by rank, by operation and size, with the straggler.

There are two views, and `checks` compares them. The step rows give waiting for the slowest rank and
transfer, which add up to comm_s. The operation rows give when each rank requested an operation,
when all ranks had begun it, and when it ended (paceline.analysis.trial.communication).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl
from pydantic import computed_field
from pydantic.dataclasses import dataclass

from paceline.analysis.trial.phases import mean_steps
from paceline.analysis.trial.reading import RankRecord, TrialRecord
from paceline.analysis.trial.steps import RankSteps, read_steps
from paceline.analysis.trial.stragglers import Straggling, find_straggler
from paceline.measure.records.phases import Phases
from paceline.measure.records.rows import CommunicationRow
from paceline.measure.records.tables import read_table
from paceline.plan.costs import ALL_REDUCE, all_reduce

# --- operations of all ranks in one frame, and where their time went -----------------------------
#
# Waiting runs from a rank's turn to the turn of the group's last rank; transfer runs from then to
# the rank's own end. Turns are compared on rank 0's clock. A wait that is shorter than the clock
# errors of both ranks cannot be measured, and counts as transfer.
#
# Exposed time lies within the step's exposed window: from this rank's last gradient being ready to
# the end of the communication after it (StepRow.comm_s). Where the rank computes between two
# operations, as with ZeRO-1, both lie within the window, and it computes during none of them.
# Overlapped time runs in parallel with computation. Where several operations are active at once,
# the time counts for the one that began first. So nothing is counted twice: the exposed times of a
# step's operations and the gaps between them add up to comm_s. An operation that the rank awaited
# within a pass is exposed, too: its time there is a part of StepRow.pass_comm_s.

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


# Upper bounds of the sizes that are taken together, those of the fourth paper's figures, made with
# hvprof (Awan, Jain, Chu, Subramoni and Panda: Communication Profiling and Characterization of Deep
# Learning Workloads on Clusters with High-Performance Interconnects, Hot Interconnects, 2019).
BOUNDS_BYTES = (10**5, 10**6, 10**7, 10**8)
_KIND = ("operation", "algorithm", "size")


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeBin:
    """Operations of one kind, algorithm and range of sizes; of one rank, or summed over ranks.

    Seconds and bytes are sums. wait_s and transfer_s cover the operations that all ranks recorded;
    None if there are none. sent_bytes and sent_messages are None where the transport does not count
    them.
    """

    operation: str
    algorithm: str | None
    least_bytes: int
    most_bytes: int | None  # exclusive; None for no limit
    count: int
    payload_bytes: int
    time_s: float
    wait_s: float | None
    transfer_s: float | None
    exposed_s: float
    overlapped_s: float
    matched_bytes: int  # payload of the operations in transfer_s
    sent_bytes: int | None
    sent_messages: int | None
    expected_bytes: int | None  # sent by all ranks according to the algorithm's formula
    expected_messages: int | None  # lower bound: long messages are sent in several parts

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """Payload over transfer time; None where there was no transfer."""
        if not self.transfer_s or not self.matched_bytes:
            return None
        return self.matched_bytes / self.transfer_s


def bins(operations: pl.DataFrame, *, all_ranks: bool) -> tuple[SizeBin, ...]:
    """Group operations by kind, algorithm and size.

    operations: from `operation_times`. all_ranks: True if these are the rows of all ranks. Only
    then the bytes sent can be compared with the formula of the algorithm, because ranks send
    different parts.
    """
    # the number of the range between BOUNDS_BYTES
    size = pl.sum_horizontal(pl.col("payload_bytes") >= bound for bound in BOUNDS_BYTES)
    sized = operations.with_columns(size=size.cast(pl.Int64))
    expected = _expected(sized) if all_ranks else {}
    is_matched = pl.col("wait_s").is_not_null()
    grouped = sized.group_by(_KIND).agg(
        pl.len().alias("count"),
        pl.col("payload_bytes", "time_s", "exposed_s", "overlapped_s").sum(),
        pl.when(is_matched.any()).then(pl.col("wait_s", "transfer_s").sum()),
        pl.col("payload_bytes").filter(is_matched).sum().alias("matched_bytes"),
        *(
            pl.when(pl.col(name).is_not_null().all()).then(pl.col(name).sum())
            for name in ("sent_bytes", "sent_messages")
        ),
    )
    found = []
    for row in grouped.sort(_KIND).iter_rows(named=True):
        size = row.pop("size")
        bytes_, messages = expected.get((row["operation"], row["algorithm"], size), (None, None))
        found.append(
            SizeBin(
                **row,
                least_bytes=0 if size == 0 else BOUNDS_BYTES[size - 1],
                most_bytes=None if size == len(BOUNDS_BYTES) else BOUNDS_BYTES[size],
                expected_bytes=None if bytes_ is None else round(bytes_),
                expected_messages=None if messages is None else round(messages),
            )
        )
    return tuple(found)


def _expected(sized: pl.DataFrame) -> dict[tuple[str, str, int], tuple[float, float]]:
    """Return the bytes and messages that the algorithms of all-reduces send, by kind.

    sized: one row per rank. Long messages are sent in several parts, so the number of messages is a
    lower bound.
    """
    found: dict[tuple[str, str, int], tuple[float, float]] = {}
    counted = sized.group_by(*_KIND, "ranks").agg(pl.len(), pl.col("payload_bytes").sum())
    for operation, algorithm, size, ranks, count, payload_bytes in counted.iter_rows():
        if operation == "allreduce" and algorithm in ALL_REDUCE:
            cost = all_reduce(algorithm, ranks)
            before = found.get((operation, algorithm, size), (0.0, 0.0))
            found[operation, algorithm, size] = (
                before[0] + cost.volumes / ranks * payload_bytes,
                before[1] + cost.messages / ranks * count,
            )
    return found


_ALLOWED = 0.02  # of a step: largest difference of the sums
_COMMUNICATION = ("comm_wait", "comm_transfer")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommunication:
    """One rank's mean steady step, in seconds.

    phases_s: by STEP_PHASES. The next three are None where no operation was recorded.
    overlapped_s: an operation was active in parallel with computation. exposed_s: an operation was
    active within comm_s, and that of layers within the passes. between_s: the rest of comm_s.
    """

    rank: int
    host: str | None
    clock_offset_s: float
    clock_error_s: float
    steps: int
    step_s: float
    wall_s: float  # of the same steps by the clock, first start to last end, over their number
    phases_s: Phases
    overlapped_s: float | None
    exposed_s: float | None
    between_s: float | None
    bins: tuple[SizeBin, ...]  # of the steady steps

    @computed_field  # type: ignore[prop-decorator]
    @property
    def comm_s(self) -> float | None:
        found = [self.phases_s[name] for name in _COMMUNICATION]
        return None if None in found else sum(v for v in found if v is not None)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def compute_s(self) -> float:
        """Sum of all phases except communication and the pipeline bubble."""
        apart = (*_COMMUNICATION, "bubble")
        return sum(v for name, v in self.phases_s.items() if name not in apart and v is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SumCheck:
    """Two sums that should be equal: the largest difference of any rank, as a share of its step."""

    name: str
    difference: float
    allowed: float

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        return abs(self.difference) <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCommunication:
    """A trial's communication. Bins are sums over all ranks and the steady steps."""

    trial: str
    configuration: str
    repeat: int
    transport: str
    ranks: tuple[RankCommunication, ...]
    operations_recorded: bool  # False: only the step rows are available
    bins: tuple[SizeBin, ...]
    stragglers: tuple[Straggling, ...]  # one; in a pipeline one for each stage
    checks: tuple[SumCheck, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def clock_error_s(self) -> float:
        """The largest error of a comparison between two ranks' times."""
        errors = sorted(rank.clock_error_s for rank in self.ranks)
        return sum(errors[-2:])


def trial_communication(record: TrialRecord) -> TrialCommunication | None:
    """Analyse one trial; None if no steady step communicated.

    Raises DataError if a file is damaged.
    """
    steps = read_steps(record)
    steady = steps.steady()
    if np.isnan(steady["comm_s"]).all():
        return None
    operations = load_operations(record)
    errors_s = clock_errors(record, operations)
    timed = operation_times(steps, operations, errors_s)
    phases = mean_steps(steady)
    ranks = tuple(
        _rank(rank, steady, phases[rank.rank], errors_s[rank.rank], timed)
        for rank in record.ranks
        if rank.rank in phases
    )
    return TrialCommunication(
        trial=record.trial.id,
        configuration=record.trial.configuration,
        repeat=record.trial.repeat,
        transport=record.trial.transport,
        ranks=ranks,
        operations_recorded=not timed.is_empty(),
        bins=bins(timed.filter(pl.col("step").is_in(steady.step)), all_ranks=True),
        stragglers=find_straggler(record, steps, errors_s),
        checks=_checks(ranks),
    )


def _rank(
    rank: RankRecord,
    steady: RankSteps,
    phases_s: Phases,
    clock_error_s: float,
    operations: pl.DataFrame,
) -> RankCommunication:
    """Analyse one rank. steady: the steady steps. operations: of all ranks."""
    rows = steady.of_rank(rank.rank)
    steps = len(rows)
    own = operations.filter(pl.col("rank") == rank.rank, pl.col("step").is_in(steady.step))
    overlapped_s = exposed_s = between_s = None
    if not operations.is_empty():
        after_s = float(own["after_passes_s"].sum())
        exposed_s = (after_s + float(rows["pass_comm_s"].sum())) / steps
        overlapped_s = float(own["overlapped_s"].sum()) / steps
        between_s = (float(rows["comm_s"].sum()) - after_s) / steps
    return RankCommunication(
        rank=rank.rank,
        host=rank.host,
        clock_offset_s=rank.clock_offset_s,
        clock_error_s=clock_error_s,
        steps=steps,
        step_s=float(rows["step_s"].sum()) / steps,
        wall_s=_wall_s(rows, steady.after_pauses.tolist()) / steps,
        phases_s=phases_s,
        overlapped_s=overlapped_s,
        exposed_s=exposed_s,
        between_s=between_s,
        bins=bins(own, all_ranks=False),
    )


def _wall_s(rows: pl.DataFrame, apart: Sequence[int]) -> float:
    """Return the time from the first step to the end of the last one, without gaps of other work.

    Steps that are left out are such gaps. apart: the numbers of the steps after the others.
    """
    between_s = pl.col("started_s") - pl.col("ended_s").shift(1)
    is_next = (pl.col("step").diff() == 1) & ~pl.col("step").is_in(apart)
    counted = rows.select(between_s.filter(is_next).sum()).item()
    return float(rows["step_s"].sum()) + float(counted)


def _checks(ranks: tuple[RankCommunication, ...]) -> tuple[SumCheck, ...]:
    """Check that phases add up to the measured time, and operations to the communication in it."""
    phases = [sum(v for v in r.phases_s.values() if v is not None) / r.wall_s - 1 for r in ranks]
    found = [("phases add up to the measured step time", phases)]
    profiled = [
        (r.wall_s - r.compute_s - (r.phases_s["bubble"] or 0.0) - r.exposed_s) / r.wall_s
        for r in ranks
        if r.exposed_s is not None
    ]
    if profiled:
        found.append(
            ("computation and exposed operations add up to the measured step time", profiled)
        )
    return tuple(
        SumCheck(name=name, difference=max(differences, key=abs), allowed=_ALLOWED)
        for name, differences in found
    )
