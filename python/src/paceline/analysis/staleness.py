"""Staleness of updates that were made without a barrier, and whether each was applied once.

The staleness of an update is the number of updates of the same weights between the moment when the
worker fetched them and the moment when its gradient is applied. Of weights in shards, every shard
counts its own updates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from paceline.analysis.checks import Check
from paceline.records.rows import UpdateRow
from paceline.records.tables import read_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.analysis.reading import TrialRecord

_PERCENTILE = 95
_MOST_NAMED = 3  # faulty updates in a message
_KEYS = ["worker", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Distribution of the staleness over all updates of a configuration."""

    updates: int  # applied, by all shards and in all repeats
    mean: float
    p95: float
    max: int
    lead_steps_max: int | None  # of a worker over the slowest one; None in a pipeline


def read_updates(record: TrialRecord) -> pl.DataFrame | None:
    """Return the rows of all ranks, with the rank that wrote each as `rank`; None without any."""
    frames = [
        read_table(record.files.rank(rank.rank).updates, UpdateRow).with_columns(
            pl.lit(rank.rank, dtype=pl.Int64).alias("rank")
        )
        for rank in record.ranks
    ]
    rows = pl.concat(frames) if frames else pl.DataFrame()
    return None if rows.is_empty() else rows


def staleness(repeats: Sequence[pl.DataFrame]) -> Staleness | None:
    """Summarise the updates of all repeats of a configuration; None without any."""
    if not repeats:
        return None
    applied = pl.concat(repeats).filter(pl.col("event") == "applied")
    values = applied["staleness"].drop_nulls().to_numpy()
    if not len(values):
        return None
    leads = applied["lead_steps"].drop_nulls()
    return Staleness(
        updates=len(values),
        mean=float(values.mean()),
        p95=float(np.percentile(values, _PERCENTILE)),
        max=int(values.max()),
        lead_steps_max=int(leads.to_numpy().max()) if len(leads) else None,
    )


def update_check(rows: pl.DataFrame, bound_steps: int | None) -> Check:
    """Check that every shard applied every pushed update once, and that the bound was kept.

    bound_steps: largest lead of a worker over the slowest one; None for no bound.
    """
    pushed = rows.filter(pl.col("event") == "pushed")
    applied = rows.filter(pl.col("event") == "applied")
    counts = applied.group_by(_KEYS).agg(
        pl.len().alias("applied"), pl.col("rank").n_unique().alias("ranks")
    )
    joined = pushed.join(counts, on=_KEYS, how="full", coalesce=True).with_columns(
        pl.col("applied", "ranks", "shards").fill_null(0)
    )
    faults = [
        *_named(joined.filter(pl.col("ranks") < pl.col("shards")), "lost"),
        *_named(joined.filter(pl.col("applied") > pl.col("ranks")), "applied twice"),
        *_named(joined.filter(pl.col("ranks") > pl.col("shards")), "applied, but never pushed"),
    ]
    lead = applied["lead_steps"].max()
    if bound_steps is not None and isinstance(lead, int) and lead > bound_steps:
        faults.append(f"a worker was {lead} steps ahead of the slowest, the bound is {bound_steps}")
    reason = f"{pushed.height} updates, each applied once by every shard"
    return Check(name="updates", passed=not faults, reason="; ".join(faults) or reason)


def _named(rows: pl.DataFrame, fault: str) -> list[str]:
    if rows.is_empty():
        return []
    places = rows.sort(_KEYS).head(_MOST_NAMED).select(_KEYS).iter_rows()
    named = ", ".join(f"{sequence} of rank {worker}" for worker, sequence in places)
    more = "" if rows.height <= _MOST_NAMED else f" and {rows.height - _MOST_NAMED} more"
    return [f"update {named}{more} was {fault}"]
