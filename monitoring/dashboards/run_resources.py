"""Rows of *Run*: memory, threads, communication and files."""

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
    RANK,
    RANK_LEGEND,
    SELDOM,
    largest,
    rate,
    total,
)
from monitoring.dashboards.queries import RUN as ONE

MEMORY = Row(
    title="Memory",
    panels=(
        lines(
            "RAM",
            "Share of each host's memory that is not available without swapping.",
            Query(
                f"{largest('paceline_host_memory_used_bytes', HOST, ('host',))} / "
                f"{largest('paceline_host_memory_size_bytes', HOST, ('host',))}",
                "{{host}}",
            ),
            steps=((0.8, ORANGE), (0.9, RED)),
            share=True,
        ),
        lines(
            "Memory of the run",
            "Proportional memory counts shared pages once; resident memory counts them once "
            "for each process.",
            Query(
                largest("paceline_run_proportional_memory_bytes", ONE, ("host", "run")),
                "proportional, {{host}}",
            ),
            Query(
                largest("paceline_run_resident_memory_bytes", ONE, ("host", "run")),
                "resident, {{host}}",
            ),
        ),
        lines(
            "Memory by rank",
            "Proportional set size where it is known, and resident set size.",
            Query(
                largest("paceline_rank_proportional_memory_bytes", RANK, ("host", "run", "rank")),
                f"proportional, {RANK_LEGEND}",
            ),
            Query(
                largest("paceline_rank_resident_memory_bytes", RANK, ("host", "run", "rank")),
                f"resident, {RANK_LEGEND}",
            ),
        ),
    ),
)

THREADS = Row(
    title="Did thread counts thrash",
    panels=(
        lines(
            "Threads and processes",
            "Threads and processes of the run, by host. Starting and ending threads in every "
            "step costs time; so do many more threads than cores.",
            Query(largest("paceline_run_threads", ONE, ("host", "run")), "threads, {{host}}"),
            Query(largest("paceline_run_processes", ONE, ("host", "run")), "processes, {{host}}"),
            decimals=0,
        ),
        lines(
            "Threads and processes by rank",
            "Threads of each rank's processes, and number of its processes.",
            Query(
                largest("paceline_rank_threads", RANK, ("host", "run", "rank")),
                f"threads, {RANK_LEGEND}",
            ),
            Query(
                largest("paceline_rank_processes", RANK, ("host", "run", "rank")),
                f"processes, {RANK_LEGEND}",
            ),
            decimals=0,
        ),
        lines(
            "Context switches",
            "Context switches of the run's threads per second, mean over two minutes because "
            "they are read at the expensive interval. Involuntary switches show that more "
            "threads are ready than there are cores.",
            Query(
                rate("paceline_run_context_switches_total", ONE, ("host", "run", "kind"), SELDOM),
                "{{kind}}, {{host}}",
            ),
        ),
        lines(
            "Involuntary context switches by rank",
            "Involuntary context switches of each rank's threads per second, mean over two "
            "minutes.",
            Query(
                rate(
                    "paceline_rank_context_switches_total",
                    f'{RANK},kind="involuntary"',
                    ("host", "run", "rank"),
                    SELDOM,
                ),
                RANK_LEGEND,
            ),
            width=12,
        ),
        lines(
            "Waiting for a CPU",
            "Share of time in which at least one task of the host was ready and had no CPU "
            "(pressure stall information).",
            Query(
                rate(
                    "paceline_host_pressure_waiting_seconds_total",
                    f'{HOST},resource="cpu"',
                    ("host",),
                ),
                "{{host}}",
            ),
            steps=((0.5, RED),),
            width=12,
        ),
    ),
)

COMMUNICATION = Row(
    title="Communication",
    panels=(
        lines(
            "Payload",
            "Bytes per second of the tensors in each operation, summed over all ranks.",
            Query(
                rate("paceline_communication_payload_bytes_total", RANK, ("run", "operation")),
                "{{operation}}",
            ),
            width=12,
        ),
        lines(
            "Sent",
            "Bytes per second that the ranks sent, where the transport counts them, and that "
            "the hosts' interfaces sent, including loopback.",
            Query(
                rate("paceline_communication_sent_bytes_total", RANK, ("run", "operation")),
                "{{operation}}, by the ranks",
            ),
            Query(
                rate("paceline_host_network_transmit_bytes_total", HOST, ("host", "device")),
                "{{device}} of {{host}}",
            ),
            width=12,
        ),
        lines(
            "Operations",
            "Finished operations of process groups per second, summed over all ranks.",
            Query(
                rate("paceline_communication_operations_total", RANK, ("run", "operation")),
                "{{operation}}",
            ),
            unit="ops",
            width=12,
        ),
        lines(
            "Time of an operation",
            "Time from the request to the end of an operation, including time that overlaps "
            "with computation; mean over ranks.",
            Query(
                f"{rate('paceline_communication_seconds_total', RANK, ('run', 'operation'))} / ("
                f"{rate('paceline_communication_operations_total', RANK, ('run', 'operation'))}"
                " > 0)",
                "{{operation}}",
            ),
            unit="s",
            width=12,
        ),
    ),
)

FILES = Row(
    title="Files",
    panels=(
        lines(
            "Storage, by rank",
            "Bytes per second read from and written to storage, without the page cache.",
            Query(
                rate("paceline_rank_read_bytes_total", RANK, ("host", "run", "rank")),
                f"read, {RANK_LEGEND}",
            ),
            Query(
                rate("paceline_rank_written_bytes_total", RANK, ("host", "run", "rank")),
                f"written, {RANK_LEGEND}",
            ),
        ),
        lines(
            "Storage, the whole run",
            "Bytes per second of all processes of the run, including the launcher.",
            Query(rate("paceline_run_read_bytes_total", ONE, ("host", "run")), "read, {{host}}"),
            Query(
                rate("paceline_run_written_bytes_total", ONE, ("host", "run")),
                "written, {{host}}",
            ),
        ),
        lines(
            "Open files",
            "Open file descriptors, including sockets. A number that only grows shows a leak.",
            Query(total("paceline_run_open_files", ONE, ("host", "run")), "all, {{host}}"),
            Query(largest("paceline_rank_open_files", RANK, ("host", "run", "rank")), RANK_LEGEND),
            decimals=0,
        ),
    ),
)
