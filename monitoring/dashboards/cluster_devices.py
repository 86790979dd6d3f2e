"""Rows of *Cluster*: pressure, memory, network, disks, heat, GPUs."""

from __future__ import annotations

from monitoring.dashboards.panels import (
    ORANGE,
    RED,
    Query,
    Row,
    lines,
)
from monitoring.dashboards.queries import (
    HOST,
    largest,
    rate,
)

_BY_HOST = ("host",)
_DEVICE = ("host", "device")
_GPU = ("host", "gpu")
_WAITING = "paceline_host_pressure_waiting_seconds_total"
_STALLED = "paceline_host_pressure_stalled_seconds_total"
NO_GROUP = "no data: no control group of the runs is seen"
_NO_GPU = "no data: no GPU is seen"


def gauge(name: str, labels: str = HOST, by: tuple[str, ...] = _BY_HOST) -> str:
    """The value of a gauge of ours, by host where nothing else is said."""
    return largest(f"paceline_{name}", labels, by)


PRESSURE = Row(
    title="Pressure",
    panels=(
        lines(
            "Waiting for a CPU",
            "Share of time in which at least one task waited for a CPU (pressure stall "
            "information of the kernel).",
            Query(rate(_WAITING, f'{HOST},resource="cpu"', _BY_HOST), "some, {{host}}"),
            steps=((0.5, RED),),
        ),
        *(
            lines(
                f"Waiting for {what}",
                f"Share of time in which at least one task, or all tasks, waited for {what} "
                "(pressure stall information of the kernel).",
                Query(rate(_WAITING, f'{HOST},resource="{resource}"', _BY_HOST), "some, {{host}}"),
                Query(rate(_STALLED, f'{HOST},resource="{resource}"', _BY_HOST), "all, {{host}}"),
                unit="percentunit",
                steps=((limit, RED),),
            )
            for what, resource, limit in (("memory", "memory", 0.1), ("I/O", "io", 0.3))
        ),
    ),
)

MEMORY = Row(
    title="Memory",
    panels=(
        lines(
            "RAM",
            "Share of memory that is not available without swapping. The alert "
            "PacelineMemoryNearLimit fires above the upper line.",
            Query(
                f"{gauge('host_memory_used_bytes')} / {gauge('host_memory_size_bytes')}",
                "{{host}}",
            ),
            steps=((0.8, ORANGE), (0.9, RED)),
            share=True,
        ),
        lines(
            "Control group",
            "Memory that the control group uses, including the page cache, and its limit.",
            Query(gauge("cgroup_memory_used_bytes"), "used, {{host}}"),
            Query(gauge("cgroup_memory_limit_bytes"), "limit, {{host}}"),
            missing=NO_GROUP,
        ),
        lines(
            "Swap",
            "Swap space in use, and its size.",
            Query(gauge("host_swap_used_bytes"), "used, {{host}}"),
            Query(gauge("host_swap_size_bytes"), "there is, {{host}}"),
        ),
        lines(
            "Swapping",
            "Bytes per second read from and written to swap. Measurements of a training that "
            "swaps are not meaningful.",
            Query(rate("paceline_host_swap_read_bytes_total", HOST, _BY_HOST), "in, {{host}}"),
            Query(rate("paceline_host_swap_written_bytes_total", HOST, _BY_HOST), "out, {{host}}"),
            steps=((1e6, RED),),
            width=12,
        ),
        lines(
            "Page faults",
            "Page faults per second, by kind. Major faults wait for storage. Many minor "
            "faults during training show that memory is freed and allocated again in every "
            "step.",
            Query(
                rate("paceline_host_page_faults_total", HOST, ("host", "kind")),
                "{{kind}}, {{host}}",
            ),
            width=12,
        ),
    ),
)

DEVICES = Row(
    title="Network, disks, heat",
    panels=(
        lines(
            "Network",
            "Bytes per second, by interface.",
            Query(
                rate("paceline_host_network_transmit_bytes_total", HOST, _DEVICE),
                "sent, {{device}} of {{host}}",
            ),
            Query(
                rate("paceline_host_network_receive_bytes_total", HOST, _DEVICE),
                "received, {{device}} of {{host}}",
            ),
        ),
        lines(
            "Dropped packets",
            "Dropped packets per second, in both directions. Dropped packets slow gradients down.",
            Query(
                rate("paceline_host_network_dropped_packets_total", HOST, _DEVICE),
                "{{device}} of {{host}}",
            ),
            unit="pps",
            steps=((1, ORANGE),),
        ),
        lines(
            "Disks",
            "Bytes per second, by whole disk.",
            Query(
                rate("paceline_host_disk_read_bytes_total", HOST, _DEVICE),
                "read, {{device}} of {{host}}",
            ),
            Query(
                rate("paceline_host_disk_written_bytes_total", HOST, _DEVICE),
                "written, {{device}} of {{host}}",
            ),
        ),
        lines(
            "Disks at work",
            "Share of time in which the disk had requests to serve.",
            Query(
                rate("paceline_host_disk_busy_seconds_total", HOST, _DEVICE),
                "{{device}} of {{host}}",
            ),
            steps=((0.9, RED),),
            width=12,
            high=1,
        ),
        lines(
            "Temperature",
            "Temperature of each sensor.",
            Query(
                gauge("host_temperature_celsius", HOST, ("host", "sensor")),
                "{{sensor}} of {{host}}",
            ),
            missing="no data: the hosts report no temperatures",
            unit="celsius",
            steps=((85, ORANGE), (95, RED)),
            width=12,
            low=None,
        ),
    ),
)

GPUS = Row(
    title="GPUs",
    collapsed=True,
    panels=(
        lines(
            "Utilisation",
            "Share of time in which a kernel ran on the GPU (NVML).",
            Query(
                f"{gauge('gpu_utilization_ratio', HOST, _GPU)} * on (host, gpu) group_left (name) "
                f"{gauge('gpu_info', HOST, (*_GPU, 'name'))}",
                "{{gpu}} of {{host}}, {{name}}",
            ),
            missing=_NO_GPU,
            share=True,
        ),
        lines(
            "Memory",
            "GPU memory in use, and its size.",
            Query(gauge("gpu_memory_used_bytes", HOST, _GPU), "used, {{gpu}} of {{host}}"),
            Query(gauge("gpu_memory_size_bytes", HOST, _GPU), "there is, {{gpu}} of {{host}}"),
            missing=_NO_GPU,
        ),
        lines(
            "Power",
            "Power draw of each GPU.",
            Query(gauge("gpu_power_watts", HOST, _GPU), "{{gpu}} of {{host}}"),
            missing=_NO_GPU,
        ),
        lines(
            "Clocks",
            "Clock frequencies of the multiprocessors and of the memory.",
            Query(gauge("gpu_sm_clock_hertz", HOST, _GPU), "sm, {{gpu}} of {{host}}"),
            Query(gauge("gpu_memory_clock_hertz", HOST, _GPU), "memory, {{gpu}} of {{host}}"),
            missing=_NO_GPU,
            width=12,
        ),
        lines(
            "Temperature",
            "Temperature of each GPU.",
            Query(gauge("gpu_temperature_celsius", HOST, _GPU), "{{gpu}} of {{host}}"),
            missing=_NO_GPU,
            unit="celsius",
            steps=((80, ORANGE), (90, RED)),
            width=12,
            low=None,
        ),
    ),
)
