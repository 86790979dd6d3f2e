"""Operations of every rank in columns. Times are converted to rank 0's clock here, once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from paceline.records.rows import CommunicationRow
from paceline.records.tables import has_rows, read_table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from paceline.analysis.reading import RankRecord, TrialRecord

_COLUMNS = (
    "rank", "ranks", "sequence", "payload_bytes", "asked_s", "turn_s", "ended_s", "sent_bytes",
    "sent_messages",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Arrays of one length, an entry for each operation of each rank, by rank and turn.

    Times are unix seconds on rank 0's clock. `turn_s` is when the operation could begin for this
    rank: when it was requested, or, where the operations of a group queue, when the earlier ones
    were done. sent_bytes and sent_messages are NaN where the transport does not count.
    """

    rank: NDArray[np.int64]
    group: NDArray[np.int64]  # index into `groups`; likewise the next two
    operation: NDArray[np.int64]
    algorithm: NDArray[np.int64]
    ranks: NDArray[np.int64]  # of the group
    sequence: NDArray[np.int64]
    payload_bytes: NDArray[np.int64]
    asked_s: NDArray[np.float64]
    turn_s: NDArray[np.float64]
    ended_s: NDArray[np.float64]
    sent_bytes: NDArray[np.float64]
    sent_messages: NDArray[np.float64]
    groups: tuple[str, ...]
    operations: tuple[str, ...]
    algorithms: tuple[str, ...]  # "" where there was no choice

    def __len__(self) -> int:
        return len(self.rank)


def load_operations(record: TrialRecord) -> Operations | None:
    """Read all ranks' operations; None if no rank recorded any.

    Raises DataError if a file is damaged.
    """
    paths = [(rank, record.files.rank(rank.rank).communication) for rank in record.ranks]
    parts = [
        _on_one_clock(rank, read_table(path, CommunicationRow))
        for rank, path in paths
        if has_rows(path)
    ]
    if not parts:
        return None
    table = pl.concat(parts).sort("rank", "turn_s", maintain_order=True)
    groups, group = _numbered(table["group"])
    operations, operation = _numbered(table["operation"])
    algorithms, algorithm = _numbered(table["algorithm"])
    columns = {name: table[name].to_numpy() for name in _COLUMNS}
    return Operations(
        rank=columns["rank"],
        group=group,
        operation=operation,
        algorithm=algorithm,
        ranks=columns["ranks"],
        sequence=columns["sequence"],
        payload_bytes=columns["payload_bytes"],
        asked_s=columns["asked_s"],
        turn_s=columns["turn_s"],
        ended_s=columns["ended_s"],
        sent_bytes=columns["sent_bytes"],
        sent_messages=columns["sent_messages"],
        groups=groups,
        operations=operations,
        algorithms=algorithms,
    )


def _numbered(names: pl.Series) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the distinct names, and for each row the index of its name."""
    found = names.unique(maintain_order=True)
    numbers = names.replace_strict(found, range(len(found)), return_dtype=pl.Int64)
    return tuple(found.to_list()), numbers.to_numpy()


def _on_one_clock(rank: RankRecord, rows: pl.DataFrame) -> pl.DataFrame:
    offset_s = rank.clock_offset_s
    asked = pl.col("arrived_unix_s") + offset_s
    turn = pl.max_horizontal(asked, pl.col("started_unix_s") + offset_s)
    return rows.select(
        pl.lit(rank.rank).cast(pl.Int64).alias("rank"),
        "group",
        "operation",
        pl.col("algorithm").fill_null(""),
        "ranks",
        "sequence",
        "payload_bytes",
        asked.alias("asked_s"),
        turn.alias("turn_s"),
        pl.max_horizontal(turn, pl.col("ended_unix_s") + offset_s).alias("ended_s"),
        pl.col("sent_bytes").cast(pl.Float64).fill_null(float("nan")),
        pl.col("sent_messages").cast(pl.Float64).fill_null(float("nan")),
    )
