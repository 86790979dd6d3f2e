"""Use of CPU, memory and threads during a trial, from the traces of its hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import polars as pl

from paceline.analysis.host_frames import gaps, host_frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.analysis.reading import HostTrace, RankRecord, TrialRecord

MemoryKind = Literal["pss", "rss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One trial's use of its hosts during the `train` span; None where nothing was sampled.

    CPU and IOWait are means over time and hosts, in percent of all cores of a host. RAM is the mean
    over time and hosts, and the highest share of any host. Threads are those of the run, over time,
    summed over hosts. memory_peak_bytes covers the whole trial: the peak of its processes on each
    host, summed over hosts; as proportional set size (`pss`, shared memory counted once) if it was
    read at least once on every host, else as resident set size (`rss`).
    """

    cpu_percent: float | None
    iowait_percent: float | None
    ram_percent_mean: float | None
    ram_percent_peak: float | None
    memory_peak_bytes: int | None
    memory_peak_kind: MemoryKind | None
    threads_median: float | None
    threads_peak: float | None
    run_cpu_percent: float | None  # of one core, mean over time, summed over hosts
    sidecar_core_percent: float | None  # of one core, on the host with the highest cost
    sidecar_rss_peak_bytes: int | None
    sidecar_interval_s: float | None  # the shortest of all hosts
    sidecar_samples: int  # of all hosts
    sidecar_missed_ticks: int
    sidecar_gaps: int  # stretches without samples


def trial_usage(record: TrialRecord, hosts: Sequence[HostTrace]) -> Usage:
    """Summarise the traces of all hosts of a trial."""
    frames = [(host.host, host_frame(host)) for host in hosts if not host.samples.is_empty()]
    summaries = [
        _summary(frame, span_on_host(record, name, "train")).row(0, named=True)
        for name, frame in frames
    ]
    in_training = [s for s in summaries if s["samples"]]
    memory, kind = _memory_peak([frame for _, frame in frames])
    return Usage(
        cpu_percent=_mean(s["cpu"] for s in in_training),
        iowait_percent=_mean(s["iowait"] for s in in_training),
        ram_percent_mean=_mean(s["ram_mean"] for s in in_training),
        ram_percent_peak=max(_known(s["ram_peak"] for s in in_training), default=None),
        memory_peak_bytes=memory,
        memory_peak_kind=kind,
        threads_median=_total(s["threads_median"] for s in in_training),
        threads_peak=_total(s["threads_peak"] for s in in_training),
        run_cpu_percent=_total(s["run_cpu"] for s in in_training),
        sidecar_core_percent=max(_known(s["sidecar_cpu"] for s in summaries), default=None),
        sidecar_rss_peak_bytes=max((s["sidecar_rss"] for s in summaries), default=None),
        sidecar_interval_s=min(_known(h.header.get("interval_s") for h in hosts), default=None),
        sidecar_samples=sum(len(h.samples) for h in hosts),
        sidecar_missed_ticks=sum(s["missed"] for s in summaries),
        sidecar_gaps=sum(len(gaps(h)) for h in hosts),
    )


def span_on_host(record: TrialRecord, host: str, name: str) -> tuple[float, float] | None:
    """Return first start and last end of the ranks' spans `name` on `host`, on its clock.

    Where no rank ran on `host` (a trace under another name), all ranks are taken.
    """
    there = [r for r in record.ranks if r.host == host] or list(record.ranks)
    spans = [s for r in there if (s := r.span(name)) is not None]
    if not spans:
        return None
    return min(s.started_unix_s for s in spans), max(s.ended_unix_s for s in spans)


def launch_on_host(record: TrialRecord, host: str) -> float | None:
    """Return when the trial was launched, on the clock of `host`.

    The launcher's clock is assumed to be rank 0's.
    """
    if record.outcome is None:
        return None
    there: list[RankRecord] = [r for r in record.ranks if r.host == host]
    offset = there[0].clock_offset_s if there else 0.0
    return record.outcome.launched_unix_s - offset


class BackgroundLoad(NamedTuple):
    """Counters of one host from its first to its last sample in training, as shares of CPU time."""

    computing: float  # user and system time of all processes
    run: float  # CPU time of the trial's own processes
    stolen: float  # CPU time that the hypervisor gave to other machines


def load_in_training(record: TrialRecord, host: HostTrace) -> BackgroundLoad | None:
    """Return the CPU shares of one host during the `train` span; None without two samples."""
    span = span_on_host(record, host.host, "train")
    frame = host.samples
    if span is None or not isinstance(frame.schema.get("cpu_seconds"), pl.Struct):
        return None
    # a sample describes the time before it
    inside = frame.filter(
        (pl.col("unix_s") > span[0]) & (pl.col("unix_s") <= span[1]),
        pl.col("cpu_seconds").struct.field("user").is_not_null(),
    )
    if len(inside) < 2:
        return None
    spent = inside.select(
        pl.col("cpu_seconds").struct.unnest(), pl.col("run_cpu_seconds").alias("run")
    ).select((pl.all().last() - pl.all().first()).clip(0.0).fill_null(0.0))
    seconds = spent.row(0, named=True)
    run_s = seconds.pop("run")
    total_s = sum(seconds.values())
    if total_s <= 0:
        return None
    return BackgroundLoad(
        computing=(seconds.get("user", 0.0) + seconds.get("system", 0.0)) / total_s,
        run=run_s / total_s,
        stolen=seconds.get("steal", 0.0) / total_s,
    )


def _summary(frame: pl.DataFrame, train: tuple[float, float] | None) -> pl.DataFrame:
    """Summarise one host; samples inside the training describe the time before them."""
    begin, end = train or (0.0, -1.0)
    inside = (pl.col("unix_s") > begin) & (pl.col("unix_s") <= end)

    def training(column: str) -> pl.Expr:
        known = column in frame.columns
        return pl.col(column).filter(inside) if known else pl.lit(None, dtype=pl.Float64)

    elapsed_s = pl.col("unix_s").last() - pl.col("unix_s").first()
    return frame.select(
        inside.sum().alias("samples"),
        training("cpu_busy_percent").mean().alias("cpu"),
        training("cpu_iowait_percent").mean().alias("iowait"),
        training("ram_percent").mean().alias("ram_mean"),
        training("ram_percent").max().alias("ram_peak"),
        training("run_threads").median().alias("threads_median"),
        training("run_threads").max().alias("threads_peak"),
        training("run_cpu_percent").mean().alias("run_cpu"),
        pl.when(elapsed_s > 0)
        .then(100 * _risen("sidecar_cpu_seconds") / elapsed_s)
        .alias("sidecar_cpu"),
        pl.col("sidecar_rss_bytes").max().alias("sidecar_rss"),
        _risen("sidecar_missed_ticks").alias("missed"),
    )


def _risen(column: str) -> pl.Expr:
    """Return the total increase of a counter of the sidecar; after a restart it begins at 0."""
    counter = pl.col(column).fill_null(0)
    increase = counter.diff()
    return pl.when(increase >= 0).then(increase).otherwise(counter).slice(1).sum()


def _memory_peak(frames: Sequence[pl.DataFrame]) -> tuple[int | None, MemoryKind | None]:
    """Sum the hosts' peaks; proportional only if every host has read it at least once."""
    if not frames:
        return None, None
    known = [peak for frame in frames if (peak := _proportional_peak(frame)) is not None]
    if len(known) == len(frames):
        return sum(known), "pss"
    peaks = [frame.select(pl.col("run_rss_bytes").max()).item() for frame in frames]
    return sum(peaks), "rss"


def _proportional_peak(frame: pl.DataFrame) -> int | None:
    """Estimate the peak of the proportional set size, which is read on few ticks.

    Between two readings its share of the resident set, which is read on all ticks, is taken to be
    that of the nearest reading.
    """
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
