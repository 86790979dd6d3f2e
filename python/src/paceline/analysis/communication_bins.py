"""Group operations by kind and size: number, payload, time and bandwidth."""

from __future__ import annotations

import polars as pl
from pydantic import computed_field
from pydantic.dataclasses import dataclass

from paceline.costs.link_cost import ALL_REDUCE, all_reduce

# Upper bounds of the sizes that are taken together, those of the fourth paper's figures, made with
# hvprof (Awan, Jain, Chu, Subramoni and Panda: Communication Profiling and Characterization of Deep
# Learning Workloads on Clusters with High-Performance Interconnects, Hot Interconnects, 2019).
BOUNDS_BYTES = (10**5, 10**6, 10**7, 10**8)
_KIND = ("operation", "algorithm", "size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
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


def size_bin(payload_bytes: pl.Expr) -> pl.Expr:
    """Return the number of the range between BOUNDS_BYTES to which a size belongs."""
    return pl.sum_horizontal(payload_bytes >= bound for bound in BOUNDS_BYTES).cast(pl.Int64)


def bins(operations: pl.DataFrame, *, all_ranks: bool) -> tuple[Bin, ...]:
    """Group operations by kind, algorithm and size.

    operations: from `operation_times`. all_ranks: True if these are the rows of all ranks. Only
    then the bytes sent can be compared with the formula of the algorithm, because ranks send
    different parts.
    """
    sized = operations.with_columns(size=size_bin(pl.col("payload_bytes")))
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
            Bin(
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
