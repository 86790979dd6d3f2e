"""Metrics of a host: CPU, memory, disks, networks, sensors, GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.telemetry.metrics.metric import CGROUP, HOST, Kind, Metric, Unit

if TYPE_CHECKING:
    from paceline.telemetry.host_reading import HostReading
    from paceline.telemetry.kernel import CgroupUsage

CPU_MODES = ("user", "system", "idle", "iowait", "steal", "other")
SLOW_S = 1.0  # readings that cost a millisecond or more on large hosts


def _host(
    name: str,
    kind: Kind,
    unit: Unit,
    text: str,
    read: Callable[[HostReading], Any],
    *column: str,
    labels: tuple[str, ...] = (),
    every_s: float = 0.0,
) -> Metric:
    return Metric(
        name=f"host_{name}",
        kind=kind,
        scope=HOST,
        unit=unit,
        help=text,
        read=read,
        labels=labels,
        column=column,
        every_s=every_s,
    )


def _cgroup(
    name: str, kind: Kind, unit: Unit, text: str, read: Callable[[CgroupUsage], Any], column: str
) -> Metric:
    return Metric(
        name=f"cgroup_{name}",
        kind=kind,
        scope=CGROUP,
        unit=unit,
        help=text,
        read=read,
        column=("cgroup", column),
    )


def _gpu(name: str, unit: Unit, text: str, field: str) -> Metric:
    return Metric(
        name=f"gpu_{name}",
        kind="gauge",
        scope=HOST,
        unit=unit,
        help=text,
        read=lambda host: {gpu: values.get(field) for gpu, values in host.gpus.items()},
        labels=("gpu",),
        column=("gpus", "{gpu}", field),
        every_s=SLOW_S,
    )


HOST_METRICS = (
    _host(
        "cpu_seconds",
        "counter",
        "seconds",
        "CPU time of all cores since boot, by mode. The mode `other` is nice, irq, softirq and "
        "guest. The kernel's iowait and idle can decrease (proc(5)); here they stay constant "
        "instead.",
        lambda host: host.cpu_seconds,
        "cpu_seconds",
        "{mode}",
        labels=("mode",),
    ),
    _host(
        "core_busy_seconds",
        "counter",
        "seconds",
        "Time since boot in which the core was neither idle, nor in iowait, nor stolen.",
        lambda host: host.core_busy_seconds,
        "core_busy_s",
        "{core}",
        labels=("core",),
    ),
    _host(
        "cpu_cores",
        "gauge",
        "cores",
        "Number of logical CPUs.",
        lambda host: len(host.core_busy_seconds),
        "cpu_cores",
    ),
    _host(
        "cpu_frequency_hertz",
        "gauge",
        "hertz",
        "Mean clock frequency of the cores.",
        lambda host: host.cpu_frequency_hertz,
        "cpu_frequency_hertz",
        every_s=SLOW_S,
    ),
    _host(
        "load_average",
        "gauge",
        "",
        "Mean number of runnable and uninterruptible tasks, by window (1m, 5m, 15m).",
        lambda host: host.load,
        "load",
        "{window}",
        labels=("window",),
    ),
    _host(
        "pressure_waiting_seconds",
        "counter",
        "seconds",
        "Time since boot in which at least one task waited for the resource (PSI `some`: cpu, "
        "memory, io).",
        lambda host: {name: found.some_s for name, found in host.pressure.items()},
        "pressure",
        "{resource}",
        "some_s",
        labels=("resource",),
    ),
    _host(
        "pressure_stalled_seconds",
        "counter",
        "seconds",
        "Time since boot in which all tasks waited for the resource (PSI `full`).",
        lambda host: {name: found.full_s for name, found in host.pressure.items()},
        "pressure",
        "{resource}",
        "full_s",
        labels=("resource",),
    ),
    _host(
        "memory_used_bytes",
        "gauge",
        "bytes",
        "Memory that programs use and that the kernel cannot free without swapping.",
        lambda host: host.memory.total - host.memory.available,
        "ram_used_bytes",
    ),
    _host(
        "memory_size_bytes",
        "gauge",
        "bytes",
        "Size of the memory.",
        lambda host: host.memory.total,
        "ram_total_bytes",
    ),
    _host(
        "swap_used_bytes",
        "gauge",
        "bytes",
        "Swap space in use.",
        lambda host: host.swap.used,
        "swap_used_bytes",
    ),
    _host(
        "swap_size_bytes",
        "gauge",
        "bytes",
        "Size of the swap space.",
        lambda host: host.swap.total,
        "swap_total_bytes",
    ),
    _host(
        "swap_read_bytes",
        "counter",
        "bytes",
        "Bytes swapped in since boot.",
        lambda host: host.swap.sin,
        "swapped_in_bytes",
    ),
    _host(
        "swap_written_bytes",
        "counter",
        "bytes",
        "Bytes swapped out since boot.",
        lambda host: host.swap.sout,
        "swapped_out_bytes",
    ),
    _host(
        "page_faults",
        "counter",
        "",
        "Page faults since boot, by kind (minor, major).",
        lambda host: host.page_faults,
        "{kind}_page_faults",
        labels=("kind",),
        every_s=SLOW_S,
    ),
    _host(
        "disk_read_bytes",
        "counter",
        "bytes",
        "Bytes read since boot, by whole disk.",
        lambda host: {name: disk.read_bytes for name, disk in host.disks.items()},
        "disks",
        "{device}",
        "read_bytes",
        labels=("device",),
    ),
    _host(
        "disk_written_bytes",
        "counter",
        "bytes",
        "Bytes written since boot, by whole disk.",
        lambda host: {name: disk.write_bytes for name, disk in host.disks.items()},
        "disks",
        "{device}",
        "written_bytes",
        labels=("device",),
    ),
    _host(
        "disk_busy_seconds",
        "counter",
        "seconds",
        "Time since boot in which the disk had requests to serve.",
        lambda host: {name: disk.busy_time / 1000 for name, disk in host.disks.items()},
        "disks",
        "{device}",
        "busy_s",
        labels=("device",),
    ),
    _host(
        "network_transmit_bytes",
        "counter",
        "bytes",
        "Bytes sent since boot, by interface; virtual interfaces of containers are left out.",
        lambda host: {name: nic.bytes_sent for name, nic in host.networks.items()},
        "networks",
        "{device}",
        "sent_bytes",
        labels=("device",),
    ),
    _host(
        "network_receive_bytes",
        "counter",
        "bytes",
        "Bytes received since boot, by interface.",
        lambda host: {name: nic.bytes_recv for name, nic in host.networks.items()},
        "networks",
        "{device}",
        "received_bytes",
        labels=("device",),
    ),
    _host(
        "network_dropped_packets",
        "counter",
        "",
        "Packets dropped since boot in both directions, by interface.",
        lambda host: {name: nic.dropin + nic.dropout for name, nic in host.networks.items()},
        "networks",
        "{device}",
        "dropped_packets",
        labels=("device",),
    ),
    _host(
        "temperature_celsius",
        "gauge",
        "celsius",
        "Temperature, by sensor.",
        lambda host: host.temperatures,
        "temperatures_celsius",
        "{sensor}",
        labels=("sensor",),
        every_s=SLOW_S,
    ),
    _cgroup(
        "cpu_limit_cores",
        "gauge",
        "cores",
        "Cores that the control group of the watched processes may use.",
        lambda group: group.limits.cpus,
        "cpu_limit_cores",
    ),
    _cgroup(
        "cpu_seconds",
        "counter",
        "seconds",
        "CPU time of the control group.",
        lambda group: group.cpu_s,
        "cpu_s",
    ),
    _cgroup(
        "cpu_throttled_seconds",
        "counter",
        "seconds",
        "Time in which the CPU limit stopped tasks of the control group, summed over its CPUs.",
        lambda group: group.throttled_s,
        "throttled_s",
    ),
    _cgroup(
        "cpu_throttled_periods",
        "counter",
        "",
        "Scheduling periods in which the CPU limit stopped the control group.",
        lambda group: group.throttled_periods,
        "throttled_periods",
    ),
    _cgroup(
        "memory_limit_bytes",
        "gauge",
        "bytes",
        "Memory that the control group may use.",
        lambda group: group.limits.memory_bytes,
        "memory_limit_bytes",
    ),
    _cgroup(
        "memory_used_bytes",
        "gauge",
        "bytes",
        "Memory that the control group uses, including the page cache.",
        lambda group: group.memory_used_bytes,
        "memory_used_bytes",
    ),
    Metric(
        name="gpu",
        kind="info",
        scope=HOST,
        unit="",
        help="Name of the GPU; always 1.",
        read=lambda host: {gpu: values["name"] for gpu, values in host.gpus.items()},
        labels=("gpu",),
        info_labels=("name",),
        column=("gpus", "{gpu}", "name"),
        every_s=SLOW_S,
    ),
    _gpu(
        "utilization_ratio",
        "ratio",
        "Share of the last sampling period of the driver in which a kernel was running.",
        "utilization_ratio",
    ),
    _gpu("memory_used_bytes", "bytes", "GPU memory in use.", "memory_used_bytes"),
    _gpu("memory_size_bytes", "bytes", "Size of the GPU memory.", "memory_total_bytes"),
    _gpu("power_watts", "watts", "Power draw of the GPU.", "power_watts"),
    _gpu("sm_clock_hertz", "hertz", "Clock frequency of the multiprocessors.", "sm_clock_hertz"),
    _gpu("memory_clock_hertz", "hertz", "Clock frequency of the memory.", "memory_clock_hertz"),
    _gpu("temperature_celsius", "celsius", "Temperature of the GPU.", "temperature_celsius"),
)
