"""*Cluster*: all hosts at once. Which one is the straggler, which is short of CPU, memory or I/O,
and what does the watching itself cost?"""

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
            "Hosts whose sidecars are heard.",
            Query(f"count({gauge('sidecar_last_sample_timestamp_seconds')})", "hosts"),
            unit="short",
            width=6,
            height=4,
            decimals=0,
            low=None,
        ),
        figure(
            "Runs",
            "Runs with live processes on any host.",
            Query(f"count({largest('paceline_run_processes', RUNS, ('run',))} > 0)", "runs"),
            width=6,
            height=4,
            decimals=0,
            low=None,
        ),
        figure(
            "Samples per second",
            "Trained a second, over all runs on all hosts.",
            Query(f"sum(rate(paceline_training_samples_total{{{RANK}}}[$__rate_interval]))", "all"),
            unit="suffix:samples/s",
            width=6,
            height=4,
            decimals=1,
            low=None,
        ),
        figure(
            "Oldest sign of progress",
            "Time since the run that waits longest last ended a step on any "
            "host. The alert PacelineRunStalled fires at ten of its steps, a minute at least.",
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
            low=None,
        ),
        facts_table(
            "Runs on hosts",
            "What ran where in the time shown, for how long it has been going, and what it holds.",
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
            unit="short",
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
            "A rank's own part of a step over the mean of its run's other ranks; "
            "of each host the highest. The host above the line is the straggler.",
            Query(f"max by (host, run) ({against_others()})", "{{host}}, {{run}}"),
            unit="suffix:times",
            steps=((1.25, RED),),
            width=12,
            decimals=2,
            low=None,
        ),
        lines(
            "Own part of a step, by host",
            "The mean over the host's ranks of what they do themselves in a step.",
            Query(f"avg by (host, run) ({own_step_seconds()})", "{{host}}, {{run}}"),
            unit="s",
            width=12,
        ),
        lines(
            "Waiting for gradients, by host",
            "Share of step time that is exposed communication. The straggler's is the lowest.",
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
            "Mean frequency of the cores. A host that is throttled by heat or "
            "power computes slower than its neighbours.",
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
            "Share of each host's CPU time in which nothing ran, IOWait not counted.",
            Query(share(_CPU, HOST, 'mode="idle"', _BY_HOST), "{{host}}"),
            steps=((0.6, ORANGE),),
            share=True,
        ),
        lines(
            "IOWait",
            "Share of CPU time that idled while I/O was pending. Above the line "
            "the alert PacelineIoWait fires.",
            Query(share(_CPU, HOST, 'mode="iowait"', _BY_HOST), "{{host}}"),
            steps=((0.2, RED),),
            share=True,
        ),
        lines(
            "Stolen",
            "Share of CPU time that the hypervisor gave to others.",
            Query(share(_CPU, HOST, 'mode="steal"', _BY_HOST), "{{host}}"),
            steps=((0.1, RED),),
            share=True,
        ),
        lines(
            "Load for each core",
            "Tasks that run or wait, averaged over a minute and over fifteen, by "
            "the number of cores.",
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
            "The limit of the group that the runs are in, and what the group uses.",
            Query(gauge("cgroup_cpu_limit_cores"), "limit, {{host}}"),
            Query(rate("paceline_cgroup_cpu_seconds_total", HOST, _BY_HOST), "used, {{host}}"),
            missing=NO_GROUP,
            unit="suffix:cores",
            decimals=2,
        ),
        lines(
            "Held back by the limit",
            "CPU seconds a second for which the group was throttled, and how many "
            "periods a second that happened in.",
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
    ),
)

_SIDECARS = Row(
    title="What watching costs",
    panels=(
        lines(
            "CPU of the sidecars",
            "Of one core: 1% is a hundredth of it.",
            Query(rate("paceline_sidecar_cpu_seconds_total", HOST, _BY_HOST), "{{host}}"),
            steps=((0.02, ORANGE),),
        ),
        lines(
            "Memory of the sidecars",
            "Resident.",
            Query(gauge("sidecar_resident_memory_bytes"), "{{host}}"),
            steps=((60e6, ORANGE),),
        ),
        lines(
            "Samples",
            "Taken and missed, a second; one in each interval is right.",
            Query(rate("paceline_sidecar_samples_total", HOST, _BY_HOST), "taken, {{host}}"),
            Query(
                rate("paceline_sidecar_missed_samples_total", HOST, _BY_HOST), "missed, {{host}}"
            ),
            Query(f"1 / {gauge('sidecar_interval_seconds')}", "asked for, {{host}}"),
        ),
        facts_table(
            "Sidecars",
            "Age of the last sample of each sidecar, and how often it died and was started again.",
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
            unit="short",
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
