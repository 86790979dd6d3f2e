"""Metrics of a host: CPU, memory, disks, networks, sensors, GPUs."""

from __future__ import annotations

from typing import Any

from paceline.records.metrics.metric import CGROUP, HOST, Kind, Metric

SLOW_S = 1.0  # for readings that cost a millisecond or more on large hosts


def _host(kind: Kind, name: str, column: str, text: str, **more: Any) -> Metric:
    return Metric(f"host_{name}", kind, HOST, text, column, **more)


def _cgroup(kind: Kind, name: str, column: str, text: str) -> Metric:
    return Metric(f"cgroup_{name}", kind, CGROUP, text, f"cgroup.{column}")


def _gpu(name: str, column: str, text: str) -> Metric:
    return Metric(f"gpu_{name}", "gauge", HOST, text, f"gpus.{{gpu}}.{column}", every_s=SLOW_S)


# fmt: off
HOST_METRICS = (
    _host("counter", "cpu_seconds", "cpu_seconds.{mode}",
        "CPU time of all cores since boot, by mode. The mode `other` is nice, irq, softirq and "
        "guest. The kernel's iowait and idle can decrease (proc(5)); here they stay constant "
        "instead."),
    _host("counter", "core_busy_seconds", "core_busy_s.{core}",
        "Time since boot in which the core was neither idle, nor in iowait, nor stolen."),
    _host("gauge", "cpu_cores", "cpu_cores",
        "Number of logical CPUs."),
    _host("gauge", "cpu_frequency_hertz", "cpu_frequency_hertz",
        "Mean clock frequency of the cores.", every_s=SLOW_S),
    _host("gauge", "load_average", "load.{window}",
        "Mean number of runnable and uninterruptible tasks, by window (1m, 5m, 15m)."),
    _host("counter", "pressure_waiting_seconds", "pressure.{resource}.some_s",
        "Time since boot in which at least one task waited for the resource (PSI `some`: cpu, "
        "memory, io)."),
    _host("counter", "pressure_stalled_seconds", "pressure.{resource}.full_s",
        "Time since boot in which all tasks waited for the resource (PSI `full`)."),
    _host("gauge", "memory_used_bytes", "ram_used_bytes",
        "Memory that programs use and that the kernel cannot free without swapping.",
        required=True),
    _host("gauge", "memory_size_bytes", "ram_total_bytes",
        "Size of the memory.", required=True),
    _host("gauge", "swap_used_bytes", "swap_used_bytes",
        "Swap space in use.", required=True),
    _host("gauge", "swap_size_bytes", "swap_total_bytes",
        "Size of the swap space."),
    _host("counter", "swap_read_bytes", "swapped_in_bytes",
        "Bytes swapped in since boot."),
    _host("counter", "swap_written_bytes", "swapped_out_bytes",
        "Bytes swapped out since boot."),
    _host("counter", "page_faults", "{kind}_page_faults",
        "Page faults since boot, by kind (minor, major).",
        label_values=("minor", "major"), every_s=SLOW_S),
    _host("counter", "disk_read_bytes", "disks.{device}.read_bytes",
        "Bytes read since boot, by whole disk."),
    _host("counter", "disk_written_bytes", "disks.{device}.written_bytes",
        "Bytes written since boot, by whole disk."),
    _host("counter", "disk_busy_seconds", "disks.{device}.busy_s",
        "Time since boot in which the disk had requests to serve."),
    _host("counter", "network_transmit_bytes", "networks.{device}.sent_bytes",
        "Bytes sent since boot, by interface; virtual interfaces of containers are left out."),
    _host("counter", "network_receive_bytes", "networks.{device}.received_bytes",
        "Bytes received since boot, by interface."),
    _host("counter", "network_dropped_packets", "networks.{device}.dropped_packets",
        "Packets dropped since boot in both directions, by interface."),
    _host("gauge", "temperature_celsius", "temperatures_celsius.{sensor}",
        "Temperature, by sensor.", every_s=SLOW_S),
    _cgroup("gauge", "cpu_limit_cores", "cpu_limit_cores",
        "Cores that the control group of the watched processes may use."),
    _cgroup("counter", "cpu_seconds", "cpu_s",
        "CPU time of the control group."),
    _cgroup("counter", "cpu_throttled_seconds", "throttled_s",
        "Time in which the CPU limit stopped tasks of the control group, summed over its CPUs."),
    _cgroup("counter", "cpu_throttled_periods", "throttled_periods",
        "Scheduling periods in which the CPU limit stopped the control group."),
    _cgroup("gauge", "memory_limit_bytes", "memory_limit_bytes",
        "Memory that the control group may use."),
    _cgroup("gauge", "memory_used_bytes", "memory_used_bytes",
        "Memory that the control group uses, including the page cache."),
    Metric("gpu", "info", HOST,
        "Name of the GPU; always 1.", "gpus.{gpu}.name",
        info_labels=("name",), every_s=SLOW_S),
    _gpu("utilization_ratio", "utilization_ratio",
        "Share of the last sampling period of the driver in which a kernel was running."),
    _gpu("memory_used_bytes", "memory_used_bytes",
        "GPU memory in use."),
    _gpu("memory_size_bytes", "memory_total_bytes",
        "Size of the GPU memory."),
    _gpu("power_watts", "power_watts",
        "Power draw of the GPU."),
    _gpu("sm_clock_hertz", "sm_clock_hertz",
        "Clock frequency of the multiprocessors."),
    _gpu("memory_clock_hertz", "memory_clock_hertz",
        "Clock frequency of the memory."),
    _gpu("temperature_celsius", "temperature_celsius",
        "Temperature of the GPU."),
)
# fmt: on
