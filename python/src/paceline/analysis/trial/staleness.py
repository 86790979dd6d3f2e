"""Staleness of updates that were made without a barrier.

The staleness of an update is the number of updates of the same weights between the moment when the
worker fetched them and the moment when its gradient is applied. Of weights in shards, every shard
counts its own updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from paceline.analysis.trial.reading import TrialRecord
from paceline.measure.records.rows import UpdateRow
from paceline.measure.records.tables import read_table

_PERCENTILE = 95


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
