"""Every rank's operations in columns: runs are long, and rows of Python objects would not fit.

Times are brought to rank 0's clock here, once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from paceline.analysis.reading import read_communication

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from paceline.analysis.reading import RankRecord, TrialRecord
    from paceline.records.rows import CommunicationRow

_COLUMNS = (
    "rank", "group", "operation", "algorithm", "ranks", "sequence", "payload_bytes",
    "asked_s", "turn_s", "ended_s", "sent_bytes", "sent_messages",
)  # fmt: skip


@dataclass(slots=True)
class Names:
    """Strings by number."""

    names: list[str] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    def number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Arrays of one length, an entry for each operation of each rank, by rank and turn.

    Times are unix seconds on rank 0's clock. `turn_s` is when the operation could begin for this
    rank: when it was asked for, or, where a group's operations queue, when those before it were
    done. NaN where the transport does not count.
    """

    rank: NDArray[np.int64]
    group: NDArray[np.int64]  # number in `groups`; as the next two
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
    """All ranks' operations; None if no rank recorded any (older versions did not).

    Raises DataError if a file is damaged.
    """
    groups, operations, algorithms = Names(), Names(), Names()
    parts: list[NDArray[np.float64]] = []
    for rank in record.ranks:
        rows = read_communication(record.files.rank(rank.rank))
        if rows is None:
            continue
        found = np.fromiter(
            _values(rank, rows, groups, operations, algorithms), dtype=(np.float64, len(_COLUMNS))
        )
        parts.append(found)
    if not parts:
        return None
    table = np.concatenate(parts)
    table = table[np.lexsort((table[:, _COLUMNS.index("turn_s")], table[:, 0]))]
    columns = dict(zip(_COLUMNS, table.T, strict=True))
    whole = {name: columns.pop(name).astype(np.int64) for name in _COLUMNS[:7]}
    return Operations(
        **whole,
        **columns,
        groups=tuple(groups.names),
        operations=tuple(operations.names),
        algorithms=tuple(algorithms.names),
    )


def _values(
    rank: RankRecord,
    rows: Iterator[CommunicationRow],
    groups: Names,
    operations: Names,
    algorithms: Names,
) -> Iterator[tuple[float, ...]]:
    """In the order of _COLUMNS; every whole number here is exact in a float (below 2**53)."""
    offset_s = rank.clock_offset_s
    for row in rows:
        asked_s = row.arrived_unix_s + offset_s
        turn_s = asked_s
        if row.started_unix_s is not None:
            turn_s = max(asked_s, row.started_unix_s + offset_s)
        yield (
            rank.rank,
            groups.number(row.group),
            operations.number(row.operation),
            algorithms.number(row.algorithm or ""),
            row.ranks,
            row.sequence,
            row.payload_bytes,
            asked_s,
            turn_s,
            max(turn_s, row.ended_unix_s + offset_s),
            np.nan if row.sent_bytes is None else row.sent_bytes,
            np.nan if row.sent_messages is None else row.sent_messages,
        )
