"""Operations for fabricated trials: times are chosen on rank 0's clock, rows are on each rank's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from paceline.analysis.trial.reading import RankRecord, TrialRecord, load_trial
from paceline.measure.records.files import JsonlWriter
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.rows import CommunicationRow, StepRow
from paceline.measure.records.tables import rows

EARLY_S = 0.1  # before the last gradient: when the first bucket is asked for
FIRST_S = 0.02  # the first bucket's transfer
FIRST_BYTES, SECOND_BYTES = 2_000_000, 20_000_000


def row(
    rank: RankRecord, sequence: int, asked_s: float, ended_s: float, **changes: Any
) -> CommunicationRow:
    """asked_s, ended_s and started_s: on rank 0's clock."""
    started_s = changes.pop("started_s", None)
    fields: dict[str, Any] = {
        "group": "0",
        "ranks": 2,
        "sequence": sequence,
        "operation": "allreduce",
        "algorithm": "ring",
        "payload_bytes": SECOND_BYTES,
        "arrived_unix_s": asked_s - rank.clock_offset_s,
        "started_unix_s": None if started_s is None else started_s - rank.clock_offset_s,
        "ended_unix_s": ended_s - rank.clock_offset_s,
        "sent_bytes": None,
        "sent_messages": None,
    }
    return CommunicationRow(**{**fields, **changes})


def write(files: TrialFiles, rank: int, *operations: CommunicationRow) -> None:
    with JsonlWriter(files.rank(rank).communication) as out:
        for each in operations:
            out.write(each)


def step_rows(record: TrialRecord, rank: RankRecord) -> tuple[StepRow, ...]:
    return rows(record.files.rank(rank.rank).steps, StepRow)


def ready_s(record: TrialRecord, rank: RankRecord, step: int) -> float:
    """On rank 0's clock."""
    return next(
        found.comm_ready_unix_s + rank.clock_offset_s
        for found in step_rows(record, rank)
        if found.step == step
    )


def in_each_step(
    files: TrialFiles, rows_of: Callable[[RankRecord, StepRow, float], Iterable[CommunicationRow]]
) -> TrialRecord:
    """Write operations for each step of each rank, and read the trial.

    rows_of: of a rank, its step, and when its last gradient was ready on rank 0's clock.
    """
    record = load_trial(files)
    for rank in record.ranks:
        for step in step_rows(record, rank):
            write(files, rank.rank, *rows_of(rank, step, ready_s(record, rank, step.step)))
    return load_trial(files)


def two_buckets(files: TrialFiles, **changes: Any) -> TrialRecord:
    """Add two all-reduces a step to a fabricated trial, and read it.

    The first is asked for EARLY_S before the last gradient is ready and takes FIRST_S from when all
    have asked; the second is asked for with the last gradient and ends the step's communication.
    """
    record = load_trial(files)

    def both(rank: RankRecord, step: StepRow, own_s: float) -> tuple[CommunicationRow, ...]:
        last_s = max(ready_s(record, other, step.step) for other in record.ranks)
        number, first = 2 * step.step, {"payload_bytes": FIRST_BYTES, **changes}
        return (
            row(rank, number, own_s - EARLY_S, last_s - EARLY_S + FIRST_S, **first),
            row(rank, number + 1, own_s, own_s + step.comm_s, **changes),
        )

    return in_each_step(files, both)
