"""Everything derived from a trace: shares, rates and gaps, computed once from its counters.

A row describes the interval from the previous row to its own time. The first row has no shares and
no rates. A counter that fell was restarted; its rate is null for that interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from paceline.analysis.trial.reading import HostTrace, read_hosts, read_rank_samples
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.metrics import HOST, METRICS, RUN_PROCESSES

GAP_INTERVALS = 2.5  # a longer distance between two rows is a gap: the sidecar was not running
_LEAST_INTERVAL_S = 0.05  # of a rate: the last sample may follow the last tick immediately
_COMPUTING = ("user", "system", "nice", "other")  # not idle, waiting for disks, or stolen
# name of a rate -> column of devices, counter of each device
_DEVICE_RATES = {
    "disk_read_bytes_per_s": ("disks", "read_bytes"),
    "disk_write_bytes_per_s": ("disks", "written_bytes"),
    "network_sent_bytes_per_s": ("networks", "sent_bytes"),
    "network_received_bytes_per_s": ("networks", "received_bytes"),
}
# name of a rate -> counter in a column of its own
_COUNTER_RATES = {
    f"{name}_per_s": name
    for metric in METRICS
    if metric.kind == "counter" and metric.is_whole and metric.scope in (HOST, RUN_PROCESSES)
    for name in metric.columns
}


def host_frame(trace: HostTrace) -> pl.DataFrame:
    """Derive the shares and rates of one host, one row per sample, in order of time.

    Columns beside those of the trace: interval_s; cpu_busy_percent, cpu_idle_percent,
    cpu_iowait_percent and cpu_steal_percent of all cores; core_busy_percent, a list by core;
    ram_percent; run_cpu_percent of one core; rates per second of disks, networks and all counters
    with a column of their own; pressure_<resource>_percent of the time; load_1m;
    cgroup_throttled_percent of the time, at most 100. Null where it was not measured.
    """
    if trace.samples.is_empty():
        return trace.samples
    samples = trace.samples.sort("unix_s")
    unix_s = samples["unix_s"].to_numpy()
    derived = {
        "interval_s": np.diff(unix_s, prepend=np.nan),
        **_cpu_percent(samples),
        "ram_percent": _ram_percent(samples),
        "run_cpu_percent": _run_cpu_percent(samples),
        **{name: rate(_over_devices(samples, *of), unix_s) for name, of in _DEVICE_RATES.items()},
        **{name: _seldom_rate(column(samples, c), unix_s) for name, c in _COUNTER_RATES.items()},
        "load_1m": _of_struct(samples, "load", "1m"),
        "cgroup_throttled_percent": _throttled_percent(samples, unix_s),
    }
    if struct_fields(samples, "pressure"):
        pressure = samples["pressure"].struct.unnest()
        for resource in pressure.columns:
            waited_s = pressure[resource].struct.field("some_s").cast(pl.Float64).to_numpy()
            derived[f"pressure_{resource}_percent"] = np.clip(100 * rate(waited_s, unix_s), 0, 100)
    columns = pl.DataFrame(derived, nan_to_null=True)
    added = [*columns.get_columns(), _core_busy_percent(samples, unix_s)]
    return samples.drop([each.name for each in added], strict=False).hstack(added)


def _cpu_percent(samples: pl.DataFrame) -> dict[str, NDArray[np.float64]]:
    """Return cpu_busy, cpu_idle, cpu_iowait and cpu_steal, each in percent of all cores.

    Empty where the trace has no CPU times. samples: in order of time.
    """
    modes = struct_fields(samples, "cpu_seconds")
    if not modes:
        return {}
    seconds = samples["cpu_seconds"].struct.unnest()
    spent = {mode: _increases(column(seconds, mode)) for mode in modes}
    total = np.nansum(list(spent.values()), axis=0)

    def share(*names: str) -> NDArray[np.float64]:
        known = [spent[name] for name in names if name in spent]
        part = np.sum(known, axis=0) if known else np.full(len(samples), np.nan)
        return np.divide(100 * part, total, out=np.full(len(total), np.nan), where=total > 0)

    return {
        "cpu_busy_percent": share(*_COMPUTING),
        "cpu_idle_percent": share("idle"),
        "cpu_iowait_percent": share("iowait"),
        "cpu_steal_percent": share("steal"),
    }


def _ram_percent(samples: pl.DataFrame) -> NDArray[np.float64]:
    """Return the share of the memory of the host that is in use."""
    used, total = column(samples, "ram_used_bytes"), column(samples, "ram_total_bytes")
    return np.divide(100 * used, total, out=np.full(len(used), np.nan), where=total > 0)


def _run_cpu_percent(samples: pl.DataFrame) -> NDArray[np.float64]:
    """Return the CPU time of the run's processes in percent of one core."""
    return 100 * rate(column(samples, "run_cpu_seconds"), samples["unix_s"].to_numpy())


def _increases(counter: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the increase since the previous row; NaN if the counter fell or was not read."""
    increase = np.diff(counter, prepend=np.nan)
    return np.where(increase >= 0, increase, np.nan)


def rate(counter: NDArray[np.float64], unix_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the increase per second; NaN after an interval that is too short to divide by."""
    elapsed = np.diff(unix_s, prepend=np.nan)
    long_enough = elapsed >= _LEAST_INTERVAL_S
    return np.divide(
        _increases(counter), elapsed, out=np.full(len(elapsed), np.nan), where=long_enough
    )


def column(frame: pl.DataFrame, name: str) -> NDArray[np.float64]:
    """Return a column as floats, NaN where it is null or missing."""
    if name not in frame.columns:
        return np.full(len(frame), np.nan)
    return frame[name].cast(pl.Float64).to_numpy()


def rank_frame(samples: pl.DataFrame) -> pl.DataFrame:
    """Derive cpu_percent (of one core) for each rank on a host, in order of time.

    samples: the columns of RANK_SAMPLES.
    """
    increase = pl.col("cpu_seconds").diff().over("rank")
    elapsed = pl.col("unix_s").diff().over("rank")
    valid = (increase >= 0) & (elapsed >= _LEAST_INTERVAL_S)
    return samples.sort("unix_s").with_columns(
        pl.when(valid).then(100 * increase / elapsed).alias("cpu_percent")
    )


def gaps(trace: HostTrace) -> list[tuple[float, float]]:
    """List the stretches without samples, begin and end in unix seconds.

    Empty where the trace does not state its interval.
    """
    interval_s = trace.header.get("interval_s")
    if not isinstance(interval_s, int | float) or trace.samples.is_empty():
        return []
    times = np.sort(trace.samples["unix_s"].to_numpy())
    before = np.flatnonzero(np.diff(times) > GAP_INTERVALS * interval_s)
    return list(zip(times[before].tolist(), times[before + 1].tolist(), strict=True))


def struct_fields(frame: pl.DataFrame, column: str) -> list[str]:
    """List the keys of a dictionary column; empty if the trace does not have it."""
    kind = frame[column].dtype if column in frame.columns else None
    return [f.name for f in kind.fields] if isinstance(kind, pl.Struct) else []


def field(column: str, name: str) -> pl.Expr:
    """Select one key of a dictionary column."""
    return pl.col(column).struct.field(name)


def _of_struct(frame: pl.DataFrame, name: str, key: str) -> NDArray[np.float64]:
    """Return one key of a dictionary column; NaN where the trace does not have it."""
    if key not in struct_fields(frame, name):
        return np.full(len(frame), np.nan)
    return frame[name].struct.field(key).cast(pl.Float64).to_numpy()


def _throttled_percent(samples: pl.DataFrame, unix_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of the time in which the CPU quota stopped the run's control group.

    The kernel adds up the time over CPUs, so several throttled CPUs count as 100 % at most.
    """
    throttled_s = _of_struct(samples, "cgroup", "throttled_s")
    return np.clip(100 * rate(throttled_s, unix_s), 0, 100)


def _over_devices(samples: pl.DataFrame, devices: str, counter: str) -> NDArray[np.float64]:
    """Sum a counter over all devices; NaN where the trace lists none."""
    names = struct_fields(samples, devices)
    if not names:
        return np.full(len(samples), np.nan)
    by_device = samples[devices].struct.unnest()
    found = [column(by_device[name].struct.unnest(), counter) for name in names]
    total: NDArray[np.float64] = np.sum(found, axis=0)
    return total


def _seldom_rate(counter: NDArray[np.float64], unix_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rate of a counter that is read on some ticks only, from reading to reading."""
    known = np.flatnonzero(~np.isnan(counter))
    found = np.full(len(counter), np.nan)
    found[known] = rate(counter[known], unix_s[known])
    return found


def _core_busy_percent(samples: pl.DataFrame, unix_s: NDArray[np.float64]) -> pl.Series:
    """Return the busy share of each core as a list; null on the first row."""
    name, kind = "core_busy_percent", pl.List(pl.Float64)
    nothing = pl.Series(name, [None] * len(samples), dtype=kind)
    if samples.schema.get("core_busy_s") != kind:
        return nothing
    seconds = samples["core_busy_s"]
    cores = seconds.list.len().min()
    if not isinstance(cores, int) or not cores or seconds.null_count():
        return nothing
    shares = np.stack(
        [np.clip(100 * rate(seconds.list.get(core).to_numpy(), unix_s), 0, 100)
         for core in range(cores)], axis=1,
    )  # fmt: skip
    return pl.Series(name, [None, *shares[1:].tolist()], dtype=kind)


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
            ranks=rank_frame(read_rank_samples(files.host(trace.host))),
            gaps=gaps(trace),
        )
        for trace in read_hosts(files)
        if not trace.samples.is_empty()
    ]
