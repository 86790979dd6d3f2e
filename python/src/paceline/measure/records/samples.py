"""Formats of the sidecar's rows, derived from the declared metrics.

`hosts/<host>/trace.jsonl` has one sample of the host for each tick, `hosts/<host>/ranks.jsonl` one
of each rank's processes. Both contain counters and gauges only: the analysis computes shares, rates
and peaks. A value is null where nothing was measured or where it is not read at every tick.
"""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl
from polars._typing import PolarsDataType

from paceline.measure.records.metrics import METRICS, RANK, Metric
from paceline.measure.records.tables import RowFormat


def _format(name: str, own: dict[str, PolarsDataType], metrics: Iterable[Metric]) -> RowFormat:
    """Return the format of rows with the columns `own` and those of the metrics."""
    types = dict(own)
    required = list(own)
    for metric in metrics:
        number = pl.Int64 if metric.is_whole else pl.Float64
        types |= dict.fromkeys(metric.columns, number)
        if metric.labels == ("core",):
            types[metric.path[0]] = pl.List(number)
        if metric.required:
            required += [name for name in metric.columns if name not in own]
    return RowFormat(name, types, tuple(required), is_open=True)


HOST_SAMPLES = _format(
    "a host's sample",
    {"unix_s": pl.Float64},
    [metric for metric in METRICS if metric.in_trace and metric.scope is not RANK],
)
# unix_s is that of the host's sample at the same tick.
RANK_SAMPLES = _format(
    "a rank's sample",
    {"unix_s": pl.Float64, "rank": pl.Int64, "pid": pl.Int64},
    [metric for metric in METRICS if metric.scope is RANK],
)
