"""Every metric that a sidecar may serve: its name, type, unit, labels and meaning, once.

Names follow https://prometheus.io/docs/practices/naming/ and OpenMetrics 1.0: base units, plural
last, `_total` for counters (left out here, as prometheus_client and OpenMetrics add it). Labels are
bounded: `host` on all; `run`, the run directory's name, on what belongs to a run; `rank` on what
belongs to a rank; and labels with few values that are known beforehand, or by device. What is being
run stands once, in `paceline_run_info`; join with it on (host, run).

The exporter, the textfile, the backfill, the dashboards and the rules all go by this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "info", "histogram"]

HOST = ("host",)
RUN = ("host", "run")
RANK = ("host", "run", "rank")
RUN_FACTS = (
    "trial",
    "workload",
    "launcher",
    "transport",
    "local_strategy",
    "nodes",
    "ranks",
    "repeat",
)
PHASES = ("data_wait", "forward", "backward", "bubble", "comm", "optimizer", "other")
CPU_MODES = ("user", "system", "idle", "iowait", "steal", "other")
STEP_SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` without the suffix that its type adds; `labels` in order."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series, as queries use them."""
        if self.kind == "counter":
            return (f"{self.name}_total",)
        if self.kind == "info":
            return (f"{self.name}_info",)
        if self.kind == "histogram":
            return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")
        return (self.name,)


def _counter(name: str, text: str, labels: tuple[str, ...]) -> Metric:
    return Metric(f"paceline_{name}", "counter", text, labels)


def _gauge(name: str, text: str, labels: tuple[str, ...]) -> Metric:
    return Metric(f"paceline_{name}", "gauge", text, labels)


_HOST_METRICS = (
    _counter(
        "host_cpu_seconds",
        "CPU time since boot, all cores, by mode (other: nice, irq, softirq, guest). iowait is the "
        "kernel's, see proc(5), and never runs backwards here.",
        (*HOST, "mode"),
    ),
    _counter("host_core_busy_seconds", "Time a core computed since boot.", (*HOST, "core")),
    _gauge(
        "host_iowait_valid",
        "0 where the iowait counter ran backwards in the last sample or means nothing.",
        HOST,
    ),
    _gauge("host_cpu_cores", "Logical CPUs.", HOST),
    _gauge("host_cpu_frequency_hertz", "Mean clock of the cores.", HOST),
    _gauge(
        "host_load_average",
        "Runnable and uninterruptible tasks, averaged over a window (1m, 5m, 15m).",
        (*HOST, "window"),
    ),
    _counter(
        "host_pressure_waiting_seconds",
        "Time for which at least one task waited for a resource (PSI some: cpu, memory, io).",
        (*HOST, "resource"),
    ),
    _counter(
        "host_pressure_stalled_seconds",
        "Time for which all tasks waited for a resource (PSI full).",
        (*HOST, "resource"),
    ),
    _gauge("host_memory_used_bytes", "Memory that cannot be had without swapping.", HOST),
    _gauge("host_memory_size_bytes", "Memory of the host.", HOST),
    _gauge("host_swap_used_bytes", "Swap space in use.", HOST),
    _gauge("host_swap_size_bytes", "Swap space.", HOST),
    _counter("host_swap_read_bytes", "Swapped in since boot.", HOST),
    _counter("host_swap_written_bytes", "Swapped out since boot.", HOST),
    _counter(
        "host_page_faults", "Page faults since boot, by kind (minor, major).", (*HOST, "kind")
    ),
    _counter("host_disk_read_bytes", "Read since boot, by whole disk.", (*HOST, "device")),
    _counter("host_disk_written_bytes", "Written since boot, by whole disk.", (*HOST, "device")),
    _counter("host_disk_busy_seconds", "Time a disk had work since boot.", (*HOST, "device")),
    _counter("host_network_transmit_bytes", "Sent since boot, by interface.", (*HOST, "device")),
    _counter("host_network_receive_bytes", "Received since boot, by interface.", (*HOST, "device")),
    _counter(
        "host_network_dropped_packets",
        "Packets dropped since boot, both ways, by interface.",
        (*HOST, "device"),
    ),
    _gauge("host_temperature_celsius", "What a sensor says.", (*HOST, "sensor")),
    _gauge("cgroup_cpu_limit_cores", "Cores that the watched control group may use.", HOST),
    _counter("cgroup_cpu_seconds", "CPU time of the control group.", HOST),
    _counter("cgroup_cpu_throttled_seconds", "Time its CPUs were held back by the limit.", HOST),
    _counter("cgroup_cpu_throttled_periods", "Periods in which it was held back.", HOST),
    _gauge("cgroup_memory_limit_bytes", "Memory that the control group may use.", HOST),
    _gauge("cgroup_memory_used_bytes", "Memory that it uses, page cache included.", HOST),
    _gauge("gpu_utilization_ratio", "Share of time in which a kernel ran.", (*HOST, "gpu")),
    _gauge("gpu_memory_used_bytes", "Memory in use.", (*HOST, "gpu")),
    _gauge("gpu_memory_size_bytes", "Memory.", (*HOST, "gpu")),
    _gauge("gpu_power_watts", "Power drawn.", (*HOST, "gpu")),
    _gauge("gpu_clock_hertz", "Clock, by kind (sm, memory).", (*HOST, "gpu", "clock")),
    _gauge("gpu_temperature_celsius", "Temperature.", (*HOST, "gpu")),
)

_RUN_METRICS = (
    Metric("paceline_run", "info", "What is being run; always 1.", (*RUN, *RUN_FACTS)),
    _gauge("run_start_timestamp_seconds", "When the trial that is running was launched.", RUN),
    _gauge(
        "run_last_step_timestamp_seconds",
        "When a rank on this host last ended a step; when watching began, before the first.",
        RUN,
    ),
    _gauge("run_processes", "Live processes of the run on this host.", RUN),
    _gauge("run_threads", "Their threads.", RUN),
    _counter(
        "run_cpu_seconds",
        "CPU time of the run's processes since the watch began, ended ones included.",
        RUN,
    ),
    _gauge(
        "run_resident_memory_bytes",
        "Resident memory, summed; pages that processes share count once for each.",
        RUN,
    ),
    _gauge(
        "run_proportional_memory_bytes",
        "Proportional set size, summed, when last read; shared pages count once.",
        RUN,
    ),
    _counter(
        "run_context_switches",
        "Context switches of the run's threads since the watch began, when last read, by kind "
        "(voluntary, involuntary).",
        (*RUN, "kind"),
    ),
    _counter("run_read_bytes", "Read from storage since the watch began.", RUN),
    _counter("run_written_bytes", "Written to storage since the watch began.", RUN),
    _gauge("run_open_files", "Open file descriptors, when last counted.", RUN),
)

_RANK_METRICS = (
    _gauge("rank_failed", "1 where the rank has ended with an error.", RANK),
    _gauge("rank_processes", "Live processes of the rank.", RANK),
    _gauge("rank_threads", "Their threads.", RANK),
    _counter("rank_cpu_seconds", "CPU time since the watch began.", RANK),
    _gauge("rank_resident_memory_bytes", "Resident memory.", RANK),
    _gauge("rank_proportional_memory_bytes", "Proportional set size, when last read.", RANK),
    _counter(
        "rank_context_switches",
        "Context switches since the watch began, when last read, by kind.",
        (*RANK, "kind"),
    ),
    _counter("rank_read_bytes", "Read from storage since the watch began.", RANK),
    _counter("rank_written_bytes", "Written to storage since the watch began.", RANK),
    _gauge("rank_open_files", "Open file descriptors, when last counted.", RANK),
)

_TRAINING_METRICS = (
    _counter("training_steps", "Steps that the rank has ended.", RANK),
    _counter("training_images", "Images of the rank's shares, padding not counted.", RANK),
    _gauge("training_epoch", "Epoch of the last step, from 0.", RANK),
    _gauge("training_loss", "Mean loss of the rank's images in the last step.", RANK),
    _counter(
        "training_phase_seconds",
        "Time of the rank's steps by phase; comm is exposed communication, bubble a pipeline's "
        "waiting for its neighbours.",
        (*RANK, "phase"),
    ),
    Metric("paceline_training_step_seconds", "histogram", "Time of the rank's steps.", RANK),
    _counter(
        "communication_operations",
        "Operations of process groups that have ended, by operation.",
        (*RANK, "operation"),
    ),
    _counter(
        "communication_payload_bytes",
        "Bytes of the tensors handed to them, by operation.",
        (*RANK, "operation"),
    ),
    _counter(
        "communication_sent_bytes",
        "Bytes that the rank sent for them, where the transport counts, by operation.",
        (*RANK, "operation"),
    ),
    _counter(
        "communication_seconds",
        "Time from asking for them to their end, overlapped with computing or not, by operation.",
        (*RANK, "operation"),
    ),
)

_SIDECAR_METRICS = (
    Metric("paceline_sidecar", "info", "The sidecar; always 1.", (*HOST, "version")),
    _gauge("sidecar_watches", "Runs that it watches.", HOST),
    _counter("sidecar_cpu_seconds", "CPU time that it has used.", HOST),
    _gauge("sidecar_resident_memory_bytes", "Its resident memory.", HOST),
    _counter("sidecar_samples", "Samples taken.", HOST),
    _counter("sidecar_missed_samples", "Samples that came too late to be taken.", HOST),
    _counter("sidecar_restarts", "Times that it was found dead and started again.", HOST),
    _gauge("sidecar_interval_seconds", "Time between samples.", HOST),
    _gauge("sidecar_last_sample_timestamp_seconds", "When the host was last sampled.", HOST),
)

CATALOGUE: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        *_HOST_METRICS,
        *_RUN_METRICS,
        *_RANK_METRICS,
        *_TRAINING_METRICS,
        *_SIDECAR_METRICS,
    )
}
