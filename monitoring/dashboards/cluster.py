"""Dashboard *Cluster*: all hosts. It shows the straggler, hosts that lack CPU, memory or I/O, and
the cost of the sidecars."""

from __future__ import annotations

from monitoring.dashboards.cluster_devices import (
    DEVICES,
    GPUS,
    MEMORY,
    NO_GROUP,
    PRESSURE,
    gauge,
)
from monitoring.dashboards.panels import (
    ORANGE,
    RED,
    Column,
    Page,
    Query,
    Row,
    facts_table,
    figure,
    lines,
)
from monitoring.dashboards.queries import (
    HOST,
    RANK,
    against_others,
    largest,
    own_step_seconds,
    rate,
    share,
    total,
)
from monitoring.dashboards.queries import RUN as RUNS

_BY_HOST = ("host",)
_HOST_RUN = ("host", "run")
_WINDOWS = f'{HOST},window=~"1m|15m"'
_CPU = "paceline_host_cpu_seconds_total"


_SUMMARY = Row(
    title="At a glance",
    panels=(
        figure(
            "Hosts",
            "Number of hosts with a running sidecar.",
            Query(f"count({gauge('sidecar_last_sample_timestamp_seconds')})", "hosts"),
            unit="short",
            width=6,
            height=4,
            decimals=0,
        ),
        figure(
            "Runs",
            "Number of runs with live processes on any host.",
            Query(f"count({largest('paceline_run_processes', RUNS, ('run',))} > 0)", "runs"),
            width=6,
            height=4,
            decimals=0,
        ),
        figure(
            "Samples per second",
            "Samples trained per second, summed over all runs and hosts.",
            Query(f"sum(rate(paceline_training_samples_total{{{RANK}}}[$__rate_interval]))", "all"),
            unit="suffix:samples/s",
            width=6,
            height=4,
            decimals=1,
        ),
        figure(
            "Oldest sign of progress",
            "Longest time since a run last finished a step on any host. The alert "
            "PacelineRunStalled fires after ten steps of the run, at least one minute.",
            Query(
                "max(time() - ("
                f"{largest('paceline_training_last_step_timestamp_seconds', RANK, ('run',))} or "
                f"{largest('paceline_run_start_timestamp_seconds', RUNS, ('run',))}))",
                "seconds",
            ),
            unit="s",
            steps=((60, ORANGE), (300, RED)),
            width=6,
            height=4,
            decimals=0,
        ),
        facts_table(
            "Runs on hosts",
            "Runs on each host in the selected time, their duration and their resources.",
            {"host": "Host", "run": "Run"},
            (
                Column(
                    "Since launch",
                    f"time() - {largest('paceline_run_start_timestamp_seconds', RUNS, _HOST_RUN)}",
                    "s",
                ),
                Column("Processes", total("paceline_run_processes", RUNS, _HOST_RUN), "short"),
                Column("Threads", total("paceline_run_threads", RUNS, _HOST_RUN), "short"),
                Column(
                    "Cores used", rate("paceline_run_cpu_seconds_total", RUNS, _HOST_RUN), "short"
                ),
                Column(
                    "Memory", total("paceline_run_resident_memory_bytes", RUNS, _HOST_RUN), "bytes"
                ),
            ),
            width=24,
            height=7,
        ),
    ),
)

_STRAGGLERS = Row(
    title="Which host is the straggler",
    panels=(
        lines(
            "Slowest rank of each host, against the others",
            "A rank's own part of a step over the mean of the other ranks of its run; the "
            "highest value of each host. A host above the line has the straggler.",
            Query(f"max by (host, run) ({against_others()})", "{{host}}, {{run}}"),
            unit="suffix:times",
            steps=((1.25, RED),),
            width=12,
            decimals=2,
            low=None,
        ),
        lines(
            "Own part of a step, by host",
            "Step time without communication and bubble, mean over the ranks of the host.",
            Query(f"avg by (host, run) ({own_step_seconds()})", "{{host}}, {{run}}"),
            unit="s",
            width=12,
        ),
        lines(
            "Waiting for gradients, by host",
            "Share of step time that is exposed communication. The straggler has the lowest share.",
            Query(
                share(
                    "paceline_training_phase_seconds_total", RANK, 'phase="comm"', ("host", "run")
                ),
                "{{host}}, {{run}}",
            ),
            width=12,
            share=True,
        ),
        lines(
            "Clock",
            "Mean clock frequency of the cores. Heat or power limits can reduce it.",
            Query(gauge("host_cpu_frequency_hertz"), "{{host}}"),
            width=12,
        ),
    ),
)

_CPUS = Row(
    title="CPU",
    panels=(
        lines(
            "Idle",
            "Share of each host's CPU time in which nothing ran, without IOWait.",
            Query(share(_CPU, HOST, 'mode="idle"', _BY_HOST), "{{host}}"),
            steps=((0.6, ORANGE),),
            share=True,
        ),
        lines(
            "IOWait",
            "Share of CPU time that was idle while I/O was pending. The alert PacelineIoWait "
            "fires above the line.",
            Query(share(_CPU, HOST, 'mode="iowait"', _BY_HOST), "{{host}}"),
            steps=((0.2, RED),),
            share=True,
        ),
        lines(
            "Stolen",
            "Share of CPU time that the hypervisor gave to other machines.",
            Query(share(_CPU, HOST, 'mode="steal"', _BY_HOST), "{{host}}"),
            steps=((0.1, RED),),
            share=True,
        ),
        lines(
            "Load for each core",
            "Number of tasks that run or wait, mean over 1 and 15 minutes, divided by the "
            "number of cores.",
            Query(
                f"{gauge('host_load_average', _WINDOWS, ('host', 'window'))} "
                f"/ on (host) group_left () {gauge('host_cpu_cores')}",
                "{{window}}, {{host}}",
            ),
            unit="short",
            steps=((2, ORANGE),),
            decimals=2,
        ),
        lines(
            "Cores allowed and used, control group",
            "CPU limit of the control group of the runs, and the cores that it uses.",
            Query(gauge("cgroup_cpu_limit_cores"), "limit, {{host}}"),
            Query(rate("paceline_cgroup_cpu_seconds_total", HOST, _BY_HOST), "used, {{host}}"),
            missing=NO_GROUP,
            unit="suffix:cores",
            decimals=2,
        ),
        lines(
            "Held back by the limit",
            "Throttled CPU seconds per second of the control group, and throttled periods per "
            "second.",
            Query(
                rate("paceline_cgroup_cpu_throttled_seconds_total", HOST, _BY_HOST),
                "seconds a second, {{host}}",
            ),
            Query(
                rate("paceline_cgroup_cpu_throttled_periods_total", HOST, _BY_HOST),
                "periods a second, {{host}}",
            ),
            missing=NO_GROUP,
            unit="short",
            steps=((0.1, ORANGE),),
        ),
        lines(
            "Threads",
            "Threads of all processes of each run on a host, and the cores of the host.",
            Query(total("paceline_run_threads", RUNS, _HOST_RUN), "{{host}}, {{run}}"),
            Query(gauge("host_cpu_cores"), "cores, {{host}}"),
            unit="short",
            width=24,
            decimals=0,
        ),
    ),
)

_SIDECARS = Row(
    title="What watching costs",
    panels=(
        lines(
            "CPU of the sidecars",
            "CPU time of each sidecar, as a share of one core.",
            Query(rate("paceline_sidecar_cpu_seconds_total", HOST, _BY_HOST), "{{host}}"),
            steps=((0.02, ORANGE),),
        ),
        lines(
            "Memory of the sidecars",
            "Resident memory of each sidecar.",
            Query(gauge("sidecar_resident_memory_bytes"), "{{host}}"),
            steps=((60e6, ORANGE),),
        ),
        lines(
            "Samples",
            "Samples taken and missed per second. One sample per interval is expected.",
            Query(rate("paceline_sidecar_samples_total", HOST, _BY_HOST), "taken, {{host}}"),
            Query(
                rate("paceline_sidecar_missed_samples_total", HOST, _BY_HOST), "missed, {{host}}"
            ),
            Query(f"1 / {gauge('sidecar_interval_seconds')}", "asked for, {{host}}"),
        ),
        facts_table(
            "Sidecars",
            "Age of the last sample of each sidecar, and its number of restarts.",
            {"host": "Host", "version": "Version"},
            (
                Column(
                    "Age of last sample",
                    f"time() - {gauge('sidecar_last_sample_timestamp_seconds')}",
                    "s",
                ),
                Column("Restarts", gauge("sidecar_restarts_total"), "short"),
                Column(
                    "Sidecars",
                    f"count by (host, version) (paceline_sidecar_info{{{HOST}}})",
                    "short",
                ),
            ),
            width=24,
            height=6,
        ),
    ),
)

CLUSTER = Page(
    title="Cluster",
    description="All hosts that Paceline runs on: stragglers, pressure, limits, devices.",
    rows=(_SUMMARY, _STRAGGLERS, _CPUS, PRESSURE, MEMORY, DEVICES, GPUS, _SIDECARS),
    one_run=False,
    since="now-30m",
    epochs=False,
)
