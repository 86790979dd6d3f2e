"""Dashboard *Run*: one running run. It shows idle CPUs and their cause (IOWait or waiting for
gradients), too many threads, and the straggler."""

from __future__ import annotations

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
    FACTS,
    HOST,
    RANK,
    RANK_LEGEND,
    against_others,
    largest,
    own_step_seconds,
    quantile,
    rate,
    share,
    split,
)
from monitoring.dashboards.queries import RUN as ONE
from monitoring.dashboards.run_resources import (
    COMMUNICATION,
    FILES,
    MEMORY,
    THREADS,
)

_CPU = "paceline_host_cpu_seconds_total"
_PHASES = "paceline_training_phase_seconds_total"


def _mean_share(mode: str) -> str:
    """Return the mean share of the selected hosts' CPU time."""
    of_host = share(_CPU, HOST, f'mode="{mode}"', ("host",))
    return f"avg({of_host})"


_GLANCE = Row(
    title="At a glance",
    panels=(
        facts_table(
            "What is being run",
            "Facts of the running trial, or of the last trial in the selected time.",
            {"run": "Run", **{fact: fact.replace("_", " ").capitalize() for fact in FACTS}},
            (
                Column(
                    "Hosts",
                    f"count by (run, {', '.join(FACTS)}) "
                    f"(last_over_time(paceline_run_info{{{ONE}}}[$__range]))",
                    "short",
                ),
            ),
            width=24,
            height=4,
        ),
        figure(
            "Throughput",
            "Samples trained per second, summed over all ranks.",
            Query(rate("paceline_training_samples_total", RANK, ("run",)), "{{run}}"),
            unit="suffix:samples/s",
            width=4,
            height=5,
            decimals=1,
        ),
        figure(
            "CPU idle",
            "Share of the hosts' CPU time in which nothing ran, without IOWait. A high share "
            "means that the training does not use its cores.",
            Query(_mean_share("idle"), "idle"),
            steps=((0.3, ORANGE), (0.6, RED)),
            width=4,
            height=5,
            share=True,
        ),
        figure(
            "IOWait",
            "Share of CPU time that was idle while I/O was pending.",
            Query(_mean_share("iowait"), "IOWait"),
            steps=((0.05, ORANGE), (0.2, RED)),
            width=4,
            height=5,
            share=True,
        ),
        figure(
            "Waiting for gradients",
            "Share of the ranks' step time that is exposed communication: waiting for the "
            "slowest rank, and transfer.",
            Query(share(_PHASES, RANK, 'phase="comm"', ("run",)), "{{run}}"),
            steps=((0.2, ORANGE), (0.5, RED)),
            width=4,
            height=5,
            share=True,
        ),
        figure(
            "Loss",
            "Mean loss of the last step, averaged over the ranks that have one.",
            Query(f"avg by (run) (paceline_training_loss{{{RANK}}})", "{{run}}"),
            unit="none",
            width=4,
            height=5,
            decimals=3,
        ),
        figure(
            "Epoch",
            "Epoch of the last step, from 0.",
            Query(largest("paceline_training_epoch", RANK, ("run",)), "{{run}}"),
            unit="none",
            width=4,
            height=5,
            decimals=0,
        ),
    ),
)

_CPU_ROW = Row(
    title="Is the CPU idle, and why",
    panels=(
        lines(
            "CPU idle and IOWait",
            "Idle and IOWait by host, as in the paper's figure. Idle cores with much "
            "communication wait for gradients; IOWait means reading of data.",
            Query(share(_CPU, HOST, 'mode="idle"', ("host",)), "idle, {{host}}"),
            Query(share(_CPU, HOST, 'mode="iowait"', ("host",)), "IOWait, {{host}}"),
            steps=((0.6, RED),),
            width=12,
            share=True,
        ),
        lines(
            "CPU time by state",
            "CPU time of the selected hosts, by state.",
            Query(
                f"sum by (mode) (rate({_CPU}{{{HOST}}}[$__rate_interval])) / scalar(sum(rate("
                f"{_CPU}{{{HOST}}}[$__rate_interval])))",
                "{{mode}}",
            ),
            stacked=True,
            width=12,
            share=True,
        ),
        lines(
            "Cores that the run uses",
            "CPU seconds per second of the run's processes, and the number of cores of the host.",
            Query(rate("paceline_run_cpu_seconds_total", ONE, ("host", "run")), "used, {{host}}"),
            Query(largest("paceline_host_cpu_cores", HOST, ("host",)), "there are, {{host}}"),
            unit="suffix:cores",
            decimals=2,
        ),
        lines(
            "Cores that each rank uses",
            "CPU seconds per second of each rank's processes. Their sum is that of the run "
            "without its launcher.",
            Query(
                rate("paceline_rank_cpu_seconds_total", RANK, ("host", "run", "rank")),
                RANK_LEGEND,
            ),
            unit="suffix:cores",
            decimals=2,
        ),
        lines(
            "Cores, one by one",
            "Busy share of each core. If only one core is busy, the work is not distributed, "
            "or ranks are bound to the same core.",
            Query(
                rate("paceline_host_core_busy_seconds_total", HOST, ("host", "core")),
                "core {{core}} of {{host}}",
            ),
            high=1,
        ),
    ),
)

_STEPS = Row(
    title="Where a step's time goes",
    panels=(
        lines(
            "Phases",
            "Share of the ranks' step time by phase: comm is exposed communication, bubble is "
            "a pipeline stage waiting for its neighbours, data_wait is waiting for samples.",
            Query(split(_PHASES, RANK, "phase", ("run",)), "{{phase}}"),
            stacked=True,
            width=12,
            share=True,
        ),
        lines(
            "Waiting for gradients, by rank",
            "Share of each rank's step time that is exposed communication. The straggler has "
            "the lowest share.",
            Query(share(_PHASES, RANK, 'phase="comm"', ("host", "run", "rank")), RANK_LEGEND),
            steps=((0.5, RED),),
            width=12,
            share=True,
        ),
        lines(
            "A rank's own part of a step",
            "Step time without communication and bubble. The straggler has the highest value.",
            Query(own_step_seconds(), RANK_LEGEND),
            unit="s",
        ),
        lines(
            "Straggler",
            "A rank's own part of a step over the mean of the other ranks. The alert "
            "PacelineStraggler fires above the line.",
            Query(against_others(), RANK_LEGEND),
            unit="suffix:times",
            steps=((1.25, RED),),
            decimals=2,
            low=None,
        ),
        lines(
            "Step time",
            "Median and 95 % quantile of the ranks' step times, estimated from the buckets of "
            "a histogram.",
            Query(quantile(0.5, ("run",)), "median"),
            Query(quantile(0.95, ("run",)), "95 %"),
            unit="s",
        ),
    ),
)

_TRAINING = Row(
    title="Training",
    panels=(
        lines(
            "Throughput",
            "Samples trained per second, by rank; padding is not counted.",
            Query(
                rate("paceline_training_samples_total", RANK, ("host", "run", "rank")), RANK_LEGEND
            ),
            Query(rate("paceline_training_samples_total", RANK, ("run",)), "all"),
            unit="suffix:samples/s",
        ),
        lines(
            "Loss",
            "Mean loss of each rank's share in its last step.",
            Query(largest("paceline_training_loss", RANK, ("host", "run", "rank")), RANK_LEGEND),
            unit="none",
            low=None,
        ),
        lines(
            "Steps",
            "Steps per second, by rank.",
            Query(
                rate("paceline_training_steps_total", RANK, ("host", "run", "rank")), RANK_LEGEND
            ),
            unit="suffix:steps/s",
        ),
    ),
)

RUN = Page(
    title="Run",
    description="One running run: where its time goes, and the load of its hosts.",
    rows=(_GLANCE, _CPU_ROW, _STEPS, _TRAINING, MEMORY, THREADS, COMMUNICATION, FILES),
    one_run=True,
)
