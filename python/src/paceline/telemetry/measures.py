"""What rows say as metrics of the catalogue: pure, so that a scrape, the textfile and the backfill
of a finished trial tell the same.

A measure is (metric, its label values in the catalogue's order, value). Where nothing was measured
there is none. A histogram's value is a Distribution; `series` turns any measure into the named
series that Prometheus stores.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from paceline.telemetry.catalogue import (
    CATALOGUE,
    CPU_MODES,
    PHASES,
    RUN_FACTS,
    STEP_SECONDS_BUCKETS,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from paceline.records.rows import CgroupSample, GpuSample, HostSample, RankSample
    from paceline.telemetry.catalogue import Metric
    from paceline.telemetry.ticks import HostTick, TrainingProgress, WatchTick

_LOAD_WINDOWS = ("1m", "5m", "15m")


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram: how many values each bucket has, not cumulative; the last is beyond the last
    bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # one more than bounds
    total: float  # of all values


class Measure(NamedTuple):
    """`labels` are values, in the order of `metric.labels`."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | Distribution


class Sample(NamedTuple):
    """One series of Prometheus and its value."""

    name: str
    labels: dict[str, str]
    value: float


def series(measure: Measure) -> Iterator[Sample]:
    """The series of a measure: itself, or the cumulative buckets, sum and count of a histogram."""
    metric, of_labels, value = measure
    labels = dict(zip(metric.labels, of_labels, strict=True))
    if not isinstance(value, Distribution):
        yield Sample(metric.series[0], labels, value)
        return
    bucket, total, count = metric.series
    *below, summed, counted = series_values(value)
    bounds = (*(repr(bound) for bound in value.bounds), "+Inf")
    for bound, number in zip(bounds, below, strict=True):
        yield Sample(bucket, {**labels, "le": bound}, number)
    yield Sample(total, labels, summed)
    yield Sample(count, labels, counted)


def series_values(value: float | Distribution) -> tuple[float, ...]:
    """The values of `series`, without their names."""
    if not isinstance(value, Distribution):
        return (value,)
    below = tuple(accumulate(value.counts))
    return (*below, value.total, below[-1])


def host_tick_values(host: str, tick: HostTick, version: str) -> Iterator[Measure]:
    """All of a tick. Of trials of one run, whose series would be the same, the one that was
    launched last; and its control group, as a host may have many."""
    watches = sorted(tick.watches, key=lambda watch: watch.launched_unix_s)
    sample = tick.sample
    if watches and watches[-1].sample.cgroup is not None:
        sample = dataclasses.replace(sample, cgroup=watches[-1].sample.cgroup)
    yield from host_values(host, sample)
    for watch in {watch.run: watch for watch in watches}.values():
        yield from watch_values(host, watch)
    yield from sidecar_values(host, sample, tick.missed_samples)
    yield from _told(
        ("sidecar", (host, version), 1),
        ("sidecar_watches", (host,), len(watches)),
        ("sidecar_samples", (host,), tick.samples),
        ("sidecar_restarts", (host,), tick.restarts),
        ("sidecar_interval_seconds", (host,), tick.interval_s),
    )


def watch_values(host: str, tick: WatchTick) -> Iterator[Measure]:
    """All of one run on one host."""
    training = tick.training()
    last_step_unix_s = max(
        (p.last_step_ended_unix_s for p in training if p.last_step_ended_unix_s is not None),
        default=None,
    )
    yield from run_fact_values(host, tick.run, tick.facts)
    yield from run_time_values(host, tick.run, tick.launched_unix_s, last_step_unix_s)
    yield from run_values(host, tick.run, tick.sample)
    for rank in tick.ranks:
        yield from rank_values(host, tick.run, rank)
    for progress in training:
        yield from training_values(host, tick.run, progress)


def host_values(host: str, sample: HostSample) -> Iterator[Measure]:
    """What a row of a trace says about the host; rows of older versions say less."""
    at = (host,)
    yield from _told(
        *(("host_cpu_seconds", (host, mode), sample.cpu_seconds.get(mode)) for mode in CPU_MODES),
        *(
            ("host_core_busy_seconds", (host, str(core)), busy_s)
            for core, busy_s in enumerate(sample.core_busy_s)
        ),
        ("host_iowait_valid", at, int(sample.iowait_valid)),
        ("host_cpu_cores", at, len(sample.core_busy_s) or None),
        ("host_cpu_frequency_hertz", at, sample.cpu_frequency_hertz),
        *(
            ("host_load_average", (host, window), load)
            for window, load in zip(_LOAD_WINDOWS, sample.load, strict=False)
        ),
        *(
            ("host_pressure_waiting_seconds", (host, resource), pressure.some_s)
            for resource, pressure in sample.pressure.items()
        ),
        *(
            ("host_pressure_stalled_seconds", (host, resource), pressure.full_s)
            for resource, pressure in sample.pressure.items()
        ),
        ("host_memory_used_bytes", at, sample.ram_used_bytes),
        ("host_memory_size_bytes", at, sample.ram_total_bytes),
        ("host_swap_used_bytes", at, sample.swap_used_bytes),
        ("host_swap_size_bytes", at, sample.swap_total_bytes),
        ("host_swap_read_bytes", at, sample.swapped_in_bytes),
        ("host_swap_written_bytes", at, sample.swapped_out_bytes),
        ("host_page_faults", (host, "minor"), sample.minor_page_faults),
        ("host_page_faults", (host, "major"), sample.major_page_faults),
        *(
            ("host_temperature_celsius", (host, sensor), celsius)
            for sensor, celsius in sample.temperatures_celsius.items()
        ),
    )
    yield from _device_values(host, sample)
    if sample.cgroup is not None:
        yield from _cgroup_values(host, sample.cgroup)
    for index, gpu in enumerate(sample.gpus):
        yield from _gpu_values(host, str(index), gpu)


def _device_values(host: str, sample: HostSample) -> Iterator[Measure]:
    for device, disk in sample.disks.items():
        on_disk = (host, device)
        yield from _told(
            ("host_disk_read_bytes", on_disk, disk.read_bytes),
            ("host_disk_written_bytes", on_disk, disk.written_bytes),
            ("host_disk_busy_seconds", on_disk, disk.busy_s),
        )
    for device, network in sample.networks.items():
        on_link = (host, device)
        yield from _told(
            ("host_network_transmit_bytes", on_link, network.sent_bytes),
            ("host_network_receive_bytes", on_link, network.received_bytes),
            ("host_network_dropped_packets", on_link, network.dropped_packets),
        )


def _cgroup_values(host: str, cgroup: CgroupSample) -> Iterator[Measure]:
    at = (host,)
    yield from _told(
        ("cgroup_cpu_limit_cores", at, cgroup.cpu_limit_cores),
        ("cgroup_cpu_seconds", at, cgroup.cpu_s),
        ("cgroup_cpu_throttled_seconds", at, cgroup.throttled_s),
        ("cgroup_cpu_throttled_periods", at, cgroup.throttled_periods),
        ("cgroup_memory_limit_bytes", at, cgroup.memory_limit_bytes),
        ("cgroup_memory_used_bytes", at, cgroup.memory_used_bytes),
    )


def _gpu_values(host: str, gpu: str, sample: GpuSample) -> Iterator[Measure]:
    at = (host, gpu)
    percent = sample.utilization_percent
    yield from _told(
        ("gpu_utilization_ratio", at, None if percent is None else percent / 100.0),
        ("gpu_memory_used_bytes", at, sample.memory_used_bytes),
        ("gpu_memory_size_bytes", at, sample.memory_total_bytes),
        ("gpu_power_watts", at, sample.power_watts),
        ("gpu_clock_hertz", (*at, "sm"), sample.sm_clock_hertz),
        ("gpu_clock_hertz", (*at, "memory"), sample.memory_clock_hertz),
        ("gpu_temperature_celsius", at, sample.temperature_celsius),
    )


def run_values(host: str, run: str, sample: HostSample) -> Iterator[Measure]:
    """What a row of a trace says about the run's processes."""
    at = (host, run)
    yield from _told(
        ("run_processes", at, sample.run_processes),
        ("run_threads", at, sample.run_threads),
        ("run_cpu_seconds", at, sample.run_cpu_seconds),
        ("run_resident_memory_bytes", at, sample.run_rss_bytes),
        ("run_proportional_memory_bytes", at, sample.run_pss_bytes),
        ("run_context_switches", (*at, "voluntary"), sample.run_voluntary_context_switches),
        ("run_context_switches", (*at, "involuntary"), sample.run_involuntary_context_switches),
        ("run_read_bytes", at, sample.run_read_bytes),
        ("run_written_bytes", at, sample.run_written_bytes),
        ("run_open_files", at, sample.run_open_files),
    )


def run_fact_values(host: str, run: str, facts: Mapping[str, str]) -> Iterator[Measure]:
    """What is being run; a fact that is not known is empty."""
    yield from _told(("run", (host, run, *(facts.get(name, "") for name in RUN_FACTS)), 1))


def run_time_values(
    host: str, run: str, launched_unix_s: float, last_step_unix_s: float | None
) -> Iterator[Measure]:
    """last_step_unix_s: None before the first step."""
    yield from _told(
        ("run_start_timestamp_seconds", (host, run), launched_unix_s),
        (
            "run_last_step_timestamp_seconds",
            (host, run),
            launched_unix_s if last_step_unix_s is None else last_step_unix_s,
        ),
    )


def rank_values(host: str, run: str, sample: RankSample) -> Iterator[Measure]:
    """What a row of `ranks.jsonl` says about a rank's processes."""
    at = (host, run, str(sample.rank))
    yield from _told(
        ("rank_processes", at, sample.processes),
        ("rank_threads", at, sample.threads),
        ("rank_cpu_seconds", at, sample.cpu_seconds),
        ("rank_resident_memory_bytes", at, sample.rss_bytes),
        ("rank_proportional_memory_bytes", at, sample.pss_bytes),
        ("rank_context_switches", (*at, "voluntary"), sample.voluntary_context_switches),
        ("rank_context_switches", (*at, "involuntary"), sample.involuntary_context_switches),
        ("rank_read_bytes", at, sample.read_bytes),
        ("rank_written_bytes", at, sample.written_bytes),
        ("rank_open_files", at, sample.open_files),
    )


def training_values(host: str, run: str, progress: TrainingProgress) -> Iterator[Measure]:
    """How far a rank has come, and whether it failed."""
    at = (host, run, str(progress.rank))
    yield from _told(
        ("rank_failed", at, int(progress.failed)),
        ("training_steps", at, progress.steps),
        ("training_images", at, progress.images),
        ("training_epoch", at, progress.epoch),
        ("training_loss", at, progress.loss),
        *(
            ("training_phase_seconds", (*at, phase), progress.phase_s.get(phase))
            for phase in PHASES
        ),
        (
            "training_step_seconds",
            at,
            Distribution(STEP_SECONDS_BUCKETS, tuple(progress.step_counts), progress.step_s_sum),
        ),
    )
    for operation, totals in progress.operations.items():
        on_operation = (*at, operation)
        yield from _told(
            ("communication_operations", on_operation, totals.operations),
            ("communication_payload_bytes", on_operation, totals.payload_bytes),
            ("communication_sent_bytes", on_operation, totals.sent_bytes),
            ("communication_seconds", on_operation, totals.seconds),
        )


def sidecar_values(host: str, sample: HostSample, missed_samples: int) -> Iterator[Measure]:
    """What a row of a trace says about the sidecar itself."""
    at = (host,)
    yield from _told(
        ("sidecar_cpu_seconds", at, sample.sidecar_cpu_seconds),
        ("sidecar_resident_memory_bytes", at, sample.sidecar_rss_bytes),
        ("sidecar_missed_samples", at, missed_samples),
        ("sidecar_last_sample_timestamp_seconds", at, sample.unix_s),
    )


def _told(
    *found: tuple[str, tuple[str, ...], float | Distribution | None],
) -> Iterator[Measure]:
    """Those that were measured, as measures of the metric of that name."""
    for name, labels, value in found:
        if value is not None:
            yield Measure(CATALOGUE[f"paceline_{name}"], labels, value)
