"""Use of CPU, memory and threads during a trial, from the traces of its hosts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from paceline.analysis.trial.host_frames import column, gaps, host_frame
from paceline.analysis.trial.phases import median_of
from paceline.analysis.trial.reading import HostTrace, RankRecord, TrialRecord

MemoryKind = Literal["pss", "rss"]
_SWITCHES = (
    "run_voluntary_context_switches_per_s", "run_involuntary_context_switches_per_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUsage:
    """Use of the hosts during the `train` span; None where nothing was sampled.

    CPU and IOWait are means over time and hosts, in percent of all cores of a host. RAM is the mean
    over time and hosts, and the highest share of any host. Threads are those of the run, over time,
    summed over hosts. memory_peak_bytes covers the trial until its training ends: the peak of its
    processes on each host, summed over hosts; as proportional set size (`pss`, shared memory
    counted once) if it was read at least once on every host, else as resident set size (`rss`).
    """

    cpu_percent: float | None = None
    cpu_percent_peak: float | None = None
    iowait_percent: float | None = None
    ram_percent_mean: float | None = None
    ram_percent_peak: float | None = None
    memory_peak_bytes: float | None = None
    memory_peak_kind: MemoryKind | None = None
    threads_median: float | None = None
    threads_peak: float | None = None
    context_switches_per_s: float | None = None  # of the run, mean over time, summed over hosts
    network_sent_bytes_per_s: float | None = None  # mean over time, summed over hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarUsage:
    """Cost of the sidecars of one trial, and completeness of their traces."""

    core_percent: float | None  # of one core, on the host with the highest cost
    rss_peak_bytes: int | None
    interval_s: float | None  # the shortest of all hosts
    samples: int  # of all hosts
    missed_ticks: int
    gaps: int  # stretches without samples


def host_usage(record: TrialRecord, hosts: Sequence[HostTrace]) -> HostUsage:
    """Summarise the traces of all hosts of a trial."""
    sampled = [host for host in hosts if not host.samples.is_empty()]
    train = [TrainingSamples(record, host) for host in sampled]
    inside = [host for host in train if host.has_samples]
    memory, kind = _memory_peak([_until_trained(record, host) for host in sampled])
    return HostUsage(
        cpu_percent=_mean(host.mean("cpu_busy_percent") for host in inside),
        cpu_percent_peak=max(_known(h.peak("cpu_busy_percent") for h in inside), default=None),
        iowait_percent=_mean(host.mean("cpu_iowait_percent") for host in inside),
        ram_percent_mean=_mean(host.mean("ram_percent") for host in inside),
        ram_percent_peak=max(_known(host.peak("ram_percent") for host in inside), default=None),
        memory_peak_bytes=memory,
        memory_peak_kind=kind,
        threads_median=_total(host.median("run_threads") for host in inside),
        threads_peak=_total(host.peak("run_threads") for host in inside),
        context_switches_per_s=_total(host.mean(*_SWITCHES) for host in inside),
        network_sent_bytes_per_s=_total(host.mean("network_sent_bytes_per_s") for host in inside),
    )


def median_usage(repeats: Sequence[HostUsage]) -> HostUsage:
    """Return the median of each figure over the repeats of a configuration."""
    peak_bytes, kind = _median_memory_peak(repeats)
    return HostUsage(
        cpu_percent=median_of(r.cpu_percent for r in repeats),
        cpu_percent_peak=median_of(r.cpu_percent_peak for r in repeats),
        iowait_percent=median_of(r.iowait_percent for r in repeats),
        ram_percent_mean=median_of(r.ram_percent_mean for r in repeats),
        ram_percent_peak=median_of(r.ram_percent_peak for r in repeats),
        memory_peak_bytes=peak_bytes,
        memory_peak_kind=kind,
        threads_median=median_of(r.threads_median for r in repeats),
        threads_peak=median_of(r.threads_peak for r in repeats),
        context_switches_per_s=median_of(r.context_switches_per_s for r in repeats),
        network_sent_bytes_per_s=median_of(r.network_sent_bytes_per_s for r in repeats),
    )


def _median_memory_peak(repeats: Sequence[HostUsage]) -> tuple[float | None, MemoryKind | None]:
    """Return the median of one kind: proportional if any repeat has it, never a mixture."""
    kinds: tuple[MemoryKind, ...] = ("pss", "rss")
    for kind in kinds:
        found = median_of(r.memory_peak_bytes for r in repeats if r.memory_peak_kind == kind)
        if found is not None:
            return found, kind
    return None, None


def sidecar_usage(hosts: Sequence[HostTrace]) -> SidecarUsage:
    """Summarise the cost of all sidecars of a trial."""
    sampled = [host for host in hosts if not host.samples.is_empty()]
    return SidecarUsage(
        core_percent=max(_known(_sidecar_percent(h) for h in sampled), default=None),
        rss_peak_bytes=max(
            (int(column(h.samples, "sidecar_rss_bytes").max()) for h in sampled), default=None
        ),
        interval_s=min(_known(h.header.get("interval_s") for h in hosts), default=None),
        samples=sum(len(h.samples) for h in hosts),
        missed_ticks=sum(
            round(_total_increase(column(h.samples, "sidecar_missed_ticks"))) for h in sampled
        ),
        gaps=sum(len(gaps(h)) for h in hosts),
    )


class TrainingSamples:
    """The samples of one host inside the training; a sample describes the time before it."""

    def __init__(self, record: TrialRecord, host: HostTrace) -> None:
        self._frame = host_frame(host)
        self._inside = in_training(record, host.host, self._frame)

    @property
    def has_samples(self) -> bool:
        return bool(self._inside.any())

    def mean(self, *columns: str) -> float | None:
        """Return the mean of a column of `host_frame`, or of the sum of several."""
        return self._reduced(np.mean, *columns)

    def median(self, name: str) -> float | None:
        return self._reduced(np.median, name)

    def peak(self, name: str) -> float | None:
        return self._reduced(np.max, name)

    def _reduced(self, reduce: Callable[[NDArray[np.float64]], Any], *columns: str) -> float | None:
        """Reduce the known values; None without any."""
        found = np.sum([column(self._frame, name) for name in columns], axis=0)[self._inside]
        known = found[~np.isnan(found)]
        return float(reduce(known)) if len(known) else None


def span_on_host(record: TrialRecord, host: str, name: str) -> tuple[float, float] | None:
    """Return first start and last end of the ranks' spans `name` on `host`, on its clock.

    Where no rank ran on `host` (a trace under another name), all ranks are taken.
    """
    there = [r for r in record.ranks if r.host == host] or list(record.ranks)
    spans = [s for r in there if (s := r.span(name)) is not None]
    if not spans:
        return None
    return min(s.started_unix_s for s in spans), max(s.ended_unix_s for s in spans)


def in_training(record: TrialRecord, host: str, samples: pl.DataFrame) -> NDArray[np.bool_]:
    """Return the mask of the samples of a host in the training; a sample is of the time before."""
    span = span_on_host(record, host, "train") or (0.0, -1.0)
    unix_s = samples["unix_s"].to_numpy()
    inside: NDArray[np.bool_] = (unix_s > span[0]) & (unix_s <= span[1])
    return inside


def before_end(record: TrialRecord, host: str, samples: pl.DataFrame) -> NDArray[np.bool_]:
    """Return the mask of the samples of a host until its training ended."""
    span = span_on_host(record, host, "train")
    before: NDArray[np.bool_] = samples["unix_s"].to_numpy() <= (math.inf if not span else span[1])
    return before


def launch_on_host(record: TrialRecord, host: str) -> float | None:
    """Return when the trial was launched, on the clock of `host`.

    The launcher's clock is assumed to be rank 0's.
    """
    if record.outcome is None:
        return None
    there: list[RankRecord] = [r for r in record.ranks if r.host == host]
    offset = there[0].clock_offset_s if there else 0.0
    return record.outcome.launched_unix_s - offset


def _sidecar_percent(host: HostTrace) -> float | None:
    """Return the CPU time of the sidecar in percent of one core."""
    unix_s = host.samples["unix_s"].to_numpy()
    if unix_s[-1] <= unix_s[0]:
        return None
    spent_s = _total_increase(column(host.samples, "sidecar_cpu_seconds"))
    return 100 * spent_s / float(unix_s[-1] - unix_s[0])


def _total_increase(counter: NDArray[np.float64]) -> float:
    """Return the increase of a counter of the sidecar; after a restart it begins at 0."""
    counter = np.nan_to_num(counter)
    increase = np.diff(counter)
    return float(np.where(increase >= 0, increase, counter[1:]).sum())


def _until_trained(record: TrialRecord, host: HostTrace) -> pl.DataFrame:
    """Return the samples of a host until its ranks have trained; all if there are none before."""
    before = host.samples.filter(pl.Series(before_end(record, host.host, host.samples)))
    return host.samples if before.is_empty() else before


def _memory_peak(frames: Sequence[pl.DataFrame]) -> tuple[int | None, MemoryKind | None]:
    """Sum the hosts' peaks; proportional only if every host has read it at least once."""
    if not frames:
        return None, None
    known = [peak for frame in frames if (peak := _proportional_peak(frame)) is not None]
    if len(known) == len(frames):
        return sum(known), "pss"
    return sum(int(column(frame, "run_rss_bytes").max()) for frame in frames), "rss"


def _proportional_peak(frame: pl.DataFrame) -> int | None:
    """Estimate the peak of the proportional set size, which is read on few ticks.

    Between two readings its share of the resident set, which is read on all ticks, is taken to be
    that of the nearest reading.
    """
    if frame["run_pss_bytes"].null_count() == len(frame):
        return None
    # A sidecar that was started again after a step of the clock may repeat times.
    frame = frame.sort("unix_s")
    read = frame.filter(pl.col("run_pss_bytes").is_not_null(), pl.col("run_rss_bytes") > 0).select(
        "unix_s", (pl.col("run_pss_bytes") / pl.col("run_rss_bytes")).alias("share")
    )
    if read.is_empty():
        return None
    joined = frame.select("unix_s", "run_rss_bytes").join_asof(
        read, on="unix_s", strategy="nearest"
    )
    peak: float = joined.select((pl.col("run_rss_bytes") * pl.col("share")).max()).item()
    return round(peak)


def _known(values: Iterable[float | None]) -> list[float]:
    return [v for v in values if v is not None]


def _mean(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return sum(known) / len(known) if known else None


def _total(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return sum(known) if known else None
