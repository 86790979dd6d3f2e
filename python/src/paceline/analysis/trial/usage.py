"""Use of CPU, memory and threads during a trial, from the traces of its hosts.

Background load is the use of CPU by other processes while a trial trained. Speeds measured on a
busy machine are not the speeds of the machine, and trials with different background load cannot be
compared. CPU time of a host that the processes of the trial did not use belongs to others. Hosts
that are parts of one machine (namespaces, containers) all see the time of the whole machine, so
they are combined. Niced processes count like all others: they use caches and memory, too.
Interrupts are left out, because those of messages belong to the trial.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from paceline.analysis.trial.host_frames import column, gaps, host_frame, struct_fields
from paceline.analysis.trial.phases import median_of
from paceline.analysis.trial.reading import HostTrace, RankRecord, TrialRecord

MemoryKind = Literal["pss", "rss"]
DISTURBING_PERCENT = 10.0  # percent of all cores: far above launcher, kernel and sidecar
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
        self._inside = _in_training(record, host.host, self._frame)

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


def _in_training(record: TrialRecord, host: str, samples: pl.DataFrame) -> NDArray[np.bool_]:
    """Return the mask of the samples of a host in the training; a sample is of the time before."""
    span = span_on_host(record, host, "train") or (0.0, -1.0)
    unix_s = samples["unix_s"].to_numpy()
    inside: NDArray[np.bool_] = (unix_s > span[0]) & (unix_s <= span[1])
    return inside


def _before_end(record: TrialRecord, host: str, samples: pl.DataFrame) -> NDArray[np.bool_]:
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


class _BackgroundLoad(NamedTuple):
    """Counters of one host from its first to its last sample in training, as shares of CPU time."""

    computing: float  # user, nice and system time of all processes
    run: float  # CPU time of the trial's own processes
    stolen: float  # CPU time that the hypervisor gave to other machines
    other: float  # interrupts and guests


def _load_in_training(record: TrialRecord, host: HostTrace) -> _BackgroundLoad | None:
    """Return the CPU shares of one host during the `train` span; None without two samples.

    If the training is too short for two samples, the last ones before its end are taken: its ranks
    start up between them, and another program was probably there already.
    """
    frame = host.samples
    if "user" not in struct_fields(frame, "cpu_seconds"):
        return None
    found = np.flatnonzero(_in_training(record, host.host, frame))
    if len(found) < 2:
        found = np.flatnonzero(_before_end(record, host.host, frame))[-2:]
    if len(found) < 2:
        return None
    ends = frame[[int(found[0]), int(found[-1])]]
    seconds = ends["cpu_seconds"].struct.unnest()
    spent = {mode: max(0.0, float(np.diff(column(seconds, mode))[0])) for mode in seconds.columns}
    run_s = max(0.0, float(np.diff(column(ends, "run_cpu_seconds"))[0]))
    total_s = float(np.nansum(list(spent.values())))
    if total_s <= 0:
        return None
    return _BackgroundLoad(
        computing=sum(spent.get(mode, 0.0) for mode in ("user", "nice", "system")) / total_s,
        run=run_s / total_s,
        stolen=spent.get("steal", 0.0) / total_s,
        other=spent.get("other", 0.0) / total_s,
    )


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
    before = host.samples.filter(pl.Series(_before_end(record, host.host, host.samples)))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Percent of all cores during the `train` span, on the machine with the highest load."""

    others_percent: float  # used by processes that do not belong to the trial
    stolen_percent: float  # given to other machines by the hypervisor
    busy_percent: float  # the same as others_percent, with interrupts

    @property
    def is_load(self) -> bool:
        """Tell whether other work may have slowed the trial."""
        return self.others_percent + self.stolen_percent > DISTURBING_PERCENT


def disturbance(record: TrialRecord, hosts: Sequence[HostTrace]) -> Disturbance | None:
    """Compute the background load of one trial; None if its hosts have too few samples, or take
    turns: their traces have no CPU time of others."""
    if record.dilation > 1:
        return None
    machines: dict[str, list[_BackgroundLoad]] = defaultdict(list)
    for trace in hosts:
        load = _load_in_training(record, trace)
        if load is not None:
            machines[str(trace.header.get("boot_id") or trace.host)].append(load)
    if not machines:
        return None
    return Disturbance(
        others_percent=max(_others_percent(loads) for loads in machines.values()),
        busy_percent=max(_others_percent(loads, all_modes=True) for loads in machines.values()),
        stolen_percent=max(100 * load.stolen for loads in machines.values() for load in loads),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOfRun:
    """Trials of a run that ran beside other work; those without a measured load do not count."""

    trials: int  # that were planned
    beside_others: int  # of them
    measured_again: int
    again_beside_others: int  # of those that were measured again
    # the largest shares of any trial, in percent of all cores
    others_percent: float
    stolen_percent: float
    by_trial: Mapping[str, Disturbance]

    @property
    def flags(self) -> list[str]:
        """One sentence if other work may have slowed a trial."""
        if not self.beside_others + self.again_beside_others:
            return []
        most = [f"other processes used up to {self.others_percent:.0f} % of the cores"]
        if self.stolen_percent > 1:
            most.append(
                f"the hypervisor gave up to {self.stolen_percent:.0f} % of the CPU time to other "
                "machines"
            )
        again = f"{self.measured_again} were measured again"
        if self.again_beside_others:
            again += f" ({self.again_beside_others} of them beside other work, too)"
        counts = f"{self.beside_others} of {self.trials} trials ran beside other work; {again}"
        return [f"{counts}: {' and '.join(most)}. An idle machine shows more"]


def load_of_run(found: Mapping[str, Disturbance | None], again: Collection[str]) -> LoadOfRun:
    """Count the trials that ran beside other work. found: by trial id. again: ids of those that
    measured another one again."""
    known = {name: load for name, load in found.items() if load is not None}
    planned = [load for name, load in known.items() if name not in again]
    repeated = [load for name, load in known.items() if name in again]
    return LoadOfRun(
        trials=len(planned),
        beside_others=sum(load.is_load for load in planned),
        measured_again=len(repeated),
        again_beside_others=sum(load.is_load for load in repeated),
        others_percent=max((load.others_percent for load in known.values()), default=0.0),
        stolen_percent=max((load.stolen_percent for load in known.values()), default=0.0),
        by_trial=known,
    )


def _others_percent(loads: Sequence[_BackgroundLoad], *, all_modes: bool = False) -> float:
    """Return the load of other processes on one machine, whose hosts trained at the same time.

    all_modes: count interrupts, too.
    """
    busy = max(load.computing + (load.other if all_modes else 0.0) for load in loads)
    return 100.0 * max(0.0, busy - sum(load.run for load in loads))
