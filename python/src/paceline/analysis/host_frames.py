"""Everything derived from a trace: shares, rates and gaps, computed once from its counters.

A row describes the interval from the previous row to its own time. The first row has no shares and
no rates. A counter that fell was restarted; its rate is null for that interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import polars as pl

from paceline.analysis.reading import read_hosts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.analysis.reading import HostTrace
    from paceline.records.layout import TrialFiles

GAP_INTERVALS = 2.5  # a longer distance between two rows is a gap: the sidecar was not running
_LEAST_INTERVAL_S = 0.05  # of a rate: the last sample may follow the last tick immediately
_COMPUTING = ("user", "system", "other")  # not idle, waiting for disks, or stolen
# name of a rate -> column of devices, counter of each device
_DEVICE_RATES = {
    "disk_read_bytes_per_s": ("disks", "read_bytes"),
    "disk_write_bytes_per_s": ("disks", "written_bytes"),
    "network_sent_bytes_per_s": ("networks", "sent_bytes"),
    "network_received_bytes_per_s": ("networks", "received_bytes"),
}
_RUN_RATES = {
    "run_voluntary_context_switches_per_s": "run_voluntary_context_switches",
    "run_involuntary_context_switches_per_s": "run_involuntary_context_switches",
}


def host_frame(trace: HostTrace) -> pl.DataFrame:
    """Derive the shares and rates of one host, one row per sample, in order of time.

    Columns beside those of the trace: interval_s; cpu_busy_percent, cpu_idle_percent,
    cpu_iowait_percent and cpu_steal_percent of all cores; core_busy_percent, a list by core;
    ram_percent; run_cpu_percent of one core; rates per second of disks, network and context
    switches; pressure_<resource>_percent of the time. Null where it was not measured.
    """
    samples = trace.samples
    if samples.is_empty():
        return samples
    frame = samples.sort("unix_s").with_columns(pl.col("unix_s").diff().alias("interval_s"))
    modes = struct_fields(frame, "cpu_seconds")
    frame = frame.with_columns(
        *(_risen(field("cpu_seconds", mode)).alias(f"cpu_{mode}_s") for mode in modes),
        (100 * pl.col("ram_used_bytes") / pl.col("ram_total_bytes")).alias("ram_percent"),
        (100 * _rate(pl.col("run_cpu_seconds"))).alias("run_cpu_percent"),
        *(_rate(_over_devices(frame, *of)).alias(name) for name, of in _DEVICE_RATES.items()),
        *(_seldom_rate(counter).alias(name) for name, counter in _RUN_RATES.items()),
        *(
            (100 * _rate(field("pressure", resource).struct.field("some_s")))
            .clip(0, 100)
            .alias(f"pressure_{resource}_percent")
            for resource in struct_fields(frame, "pressure")
        ),
    )
    if modes:
        frame = frame.with_columns(*_cpu_percent(modes))
    return frame.with_columns(_core_busy_percent(frame))


def rank_frame(trace: HostTrace) -> pl.DataFrame:
    """Derive cpu_percent (of one core) for each rank on a host, in order of time."""
    if trace.ranks.is_empty():
        return trace.ranks
    rate = _rate(pl.col("cpu_seconds"), over="rank")
    return trace.ranks.sort("unix_s").with_columns((100 * rate).alias("cpu_percent"))


def gaps(trace: HostTrace) -> list[tuple[float, float]]:
    """List the stretches without samples, begin and end in unix seconds.

    Empty where the trace does not state its interval.
    """
    interval_s = trace.header.get("interval_s")
    if not isinstance(interval_s, int | float) or trace.samples.is_empty():
        return []
    times = trace.samples["unix_s"].sort().to_list()
    return [
        (before, after)
        for before, after in pairwise(times)
        if after - before > GAP_INTERVALS * interval_s
    ]


def struct_fields(frame: pl.DataFrame, column: str) -> list[str]:
    """List the keys of a dictionary column; empty if the trace does not have it."""
    kind = frame.schema.get(column)
    return [f.name for f in kind.fields] if isinstance(kind, pl.Struct) else []


def field(column: str, name: str) -> pl.Expr:
    """Select one key of a dictionary column."""
    return pl.col(column).struct.field(name)


def _over_devices(frame: pl.DataFrame, column: str, counter: str) -> pl.Expr:
    """Sum a counter over all devices; null where the system lists none."""
    kind = frame.schema.get(column)
    devices = kind.fields if isinstance(kind, pl.Struct) else []
    each = [
        field(column, device.name).struct.field(counter)
        for device in devices
        if isinstance(device.dtype, pl.Struct) and counter in device.dtype.to_schema()
    ]
    if not each:
        return pl.lit(None, dtype=pl.Float64)
    return pl.sum_horizontal(each, ignore_nulls=False)


def _risen(counter: pl.Expr) -> pl.Expr:
    """Return the increase since the previous row; null if the counter fell."""
    increase = counter.diff()
    return pl.when(increase >= 0).then(increase)


def _rate(counter: pl.Expr, over: str | None = None) -> pl.Expr:
    """Return the increase per second; null after an interval that is too short to divide by."""
    increase, elapsed = counter.diff(), pl.col("unix_s").diff()
    if over is not None:
        increase, elapsed = increase.over(over), elapsed.over(over)
    return pl.when((increase >= 0) & (elapsed >= _LEAST_INTERVAL_S)).then(increase / elapsed)


def _seldom_rate(counter: str) -> pl.Expr:
    """Return the rate of a counter that is read on some ticks only, from reading to reading."""
    known = pl.col(counter).is_not_null()
    before = pl.col(counter).forward_fill().shift(1)
    since = pl.when(known).then(pl.col("unix_s")).forward_fill().shift(1)
    increase, elapsed = pl.col(counter) - before, pl.col("unix_s") - since
    return pl.when(known & (increase >= 0) & (elapsed >= _LEAST_INTERVAL_S)).then(
        increase / elapsed
    )


def _cpu_percent(modes: list[str]) -> list[pl.Expr]:
    """Express each state's increase as a share of all states' increase."""
    total = pl.sum_horizontal(f"cpu_{mode}_s" for mode in modes)

    def percent(*names: str) -> pl.Expr:
        known = [f"cpu_{name}_s" for name in names if name in modes]
        part = pl.sum_horizontal(known, ignore_nulls=False) if known else pl.lit(None)
        return pl.when(total > 0).then(100 * part / total)

    return [
        percent(*_COMPUTING).alias("cpu_busy_percent"),
        percent("idle").alias("cpu_idle_percent"),
        percent("iowait").alias("cpu_iowait_percent"),
        percent("steal").alias("cpu_steal_percent"),
    ]


def _core_busy_percent(frame: pl.DataFrame) -> pl.Expr:
    """Return the busy share of each core as a list; null on the first row."""
    nothing = pl.lit(None, dtype=pl.List(pl.Float64))
    if frame.schema.get("core_busy_s") != pl.List(pl.Float64):
        return nothing.alias("core_busy_percent")
    cores = frame["core_busy_s"].list.len().min()
    if not isinstance(cores, int) or cores == 0:
        return nothing.alias("core_busy_percent")
    shares = [
        (100 * _rate(pl.col("core_busy_s").list.get(core))).clip(0, 100) for core in range(cores)
    ]
    return pl.concat_list(shares).alias("core_busy_percent")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSeries:
    """The trace of one host with everything derived from it."""

    host: str
    header: Mapping[str, Any]
    frame: pl.DataFrame  # from `host_frame`; never empty
    ranks: pl.DataFrame  # from `rank_frame`
    gaps: list[tuple[float, float]]  # unix seconds


def read_series(files: TrialFiles) -> list[HostSeries]:
    """Read and derive the traces of all hosts of a trial that have samples.

    Raises DataError if a row is damaged.
    """
    return [
        HostSeries(
            host=trace.host,
            header=trace.header,
            frame=host_frame(trace),
            ranks=rank_frame(trace),
            gaps=gaps(trace),
        )
        for trace in read_hosts(files)
        if not trace.samples.is_empty()
    ]
