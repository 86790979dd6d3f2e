"""What the hosts did while a trial trained, from their sidecars' traces."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline.analysis.reading import HostTrace, RankRecord, TrialRecord
    from paceline.records.rows import HostSample

MemoryKind = Literal["pss", "rss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One trial's use of its hosts during the `train` span; None where nothing was sampled.

    CPU and IOWait are means over time and hosts, percent of all of a host's cores; IOWait only of
    ticks at which the kernel's counter is valid. RAM is the mean over time and hosts, and the
    highest share of any host's. Threads are those of the run, over time, summed over hosts.
    memory_peak_bytes is of the trial's whole life, not only of the training: the most that its
    processes held on each host, summed over hosts; as the proportional set size (`pss`, shared
    memory counted once) where it was read at least once, else as resident set size (`rss`).
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
    sidecar_core_percent: float | None  # of one core, the dearest host's
    sidecar_rss_peak_bytes: int | None


def trial_usage(record: TrialRecord) -> Usage:
    """Summarise the traces of all hosts of a trial."""
    train = [(host, during_training(host, record)) for host in record.hosts]
    sampled = [samples for _, samples in train if samples]
    memory, kind = _memory_peak([h.samples for h in record.hosts if h.samples])
    return Usage(
        cpu_percent=_mean(_mean(busy_percent(s) for s in samples) for samples in sampled),
        iowait_percent=_mean(_mean(iowait_percent(s) for s in samples) for samples in sampled),
        ram_percent_mean=_mean(_mean(ram_percent(s) for s in samples) for samples in sampled),
        ram_percent_peak=max(
            (ram_percent(s) for samples in sampled for s in samples), default=None
        ),
        memory_peak_bytes=memory,
        memory_peak_kind=kind,
        threads_median=_total(sampled, lambda s: median(x.run_threads for x in s)),
        threads_peak=_total(sampled, lambda s: max(x.run_threads for x in s)),
        run_cpu_percent=_total(sampled, lambda s: _mean(x.run_cpu_percent for x in s)),
        sidecar_core_percent=max(
            (v for h in record.hosts if (v := _sidecar_percent(h)) is not None), default=None
        ),
        sidecar_rss_peak_bytes=max(
            (s.sidecar_rss_bytes for h in record.hosts for s in h.samples), default=None
        ),
    )


def busy_percent(sample: HostSample) -> float | None:
    """CPU that computed for anyone: user, system and the small kinds, not idle, IOWait or steal."""
    parts = (sample.cpu_user_percent, sample.cpu_system_percent, sample.cpu_other_percent)
    known = [p for p in parts if p is not None]
    return sum(known) if known else None


def iowait_percent(sample: HostSample) -> float | None:
    """IOWait, None where the kernel's counter means nothing."""
    return sample.cpu_iowait_percent if sample.iowait_valid else None


def ram_percent(sample: HostSample) -> float:
    return 100 * sample.ram_used_bytes / sample.ram_total_bytes


def span_on_host(record: TrialRecord, host: str, name: str) -> tuple[float, float] | None:
    """First start to last end of the ranks' spans `name` on `host`, on that host's clock.

    Where no rank says it ran on `host` (a trace under another name), all ranks are taken.
    """
    there = [r for r in record.ranks if r.host == host] or list(record.ranks)
    spans = [s for r in there if (s := r.span(name)) is not None]
    if not spans:
        return None
    return min(s.started_unix_s for s in spans), max(s.ended_unix_s for s in spans)


def launch_on_host(record: TrialRecord, host: str) -> float | None:
    """When the trial was launched, on `host`'s clock (the launcher's is taken for rank 0's)."""
    if record.outcome is None:
        return None
    there: list[RankRecord] = [r for r in record.ranks if r.host == host]
    offset = there[0].clock_offset_s if there else 0.0
    return record.outcome.launched_unix_s - offset


def during_training(trace: HostTrace, record: TrialRecord) -> list[HostSample]:
    """The samples of one host that tell of the `train` span."""
    train = span_on_host(record, trace.host, "train")
    if train is None:
        return []
    # a tick tells of the time before it
    return [s for s in trace.samples if train[0] < s.unix_s <= train[1]]


def _memory_peak(
    hosts: Sequence[tuple[HostSample, ...]],
) -> tuple[int | None, MemoryKind | None]:
    """Hosts' peaks, summed; proportional only if every host has read it at least once."""
    if not hosts:
        return None, None
    proportional = [_proportional_peak(samples) for samples in hosts]
    known = [peak for peak in proportional if peak is not None]
    if len(known) == len(hosts):
        return sum(known), "pss"
    return sum(max(s.run_rss_bytes for s in host) for host in hosts), "rss"


def _proportional_peak(samples: Sequence[HostSample]) -> int | None:
    """The proportional set size is read on few ticks, which may miss the peak: in between it is
    taken to be the same share of the resident set, which is read on all, as at the nearest."""
    shares = [
        (s.unix_s, s.run_pss_bytes / s.run_rss_bytes)
        for s in samples
        if s.run_pss_bytes is not None and s.run_rss_bytes > 0
    ]
    if not shares:
        return None
    return round(
        max(
            s.run_rss_bytes * min(shares, key=lambda known: abs(known[0] - s.unix_s))[1]
            for s in samples
        )
    )


def _sidecar_percent(trace: HostTrace) -> float | None:
    if len(trace.samples) < 2:
        return None
    first, last = trace.samples[0], trace.samples[-1]
    elapsed = last.unix_s - first.unix_s
    if elapsed <= 0:
        return None
    return 100 * risen(s.sidecar_cpu_seconds for s in trace.samples) / elapsed


def risen(counts: Iterable[float]) -> float:
    """How far a counter of the sidecar's own rose; one that was started again began at 0."""
    return sum(
        later - earlier if later >= earlier else later for earlier, later in pairwise(counts)
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known else None


def _total(
    hosts: Sequence[list[HostSample]], value: Callable[[list[HostSample]], float | None]
) -> float | None:
    known = [v for host in hosts if (v := value(host)) is not None]
    return sum(known) if known else None
