"""*Run*: one run, live. Is the CPU idle, and is it IOWait or waiting for gradients that idles it?
Did the number of threads thrash? Which rank do the others wait for?"""

from __future__ import annotations

from monitoring.dashboards.panels import (
    ORANGE,
    RED,
    Column,
    Look,
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
_RANK_LEGEND = "rank {{rank}} on {{host}}"


def _mean_share(mode: str) -> str:
    """Of the chosen hosts' CPU time, each host counting the same."""
    of_host = share(_CPU, HOST, f'mode="{mode}"', ("host",))
    return f"avg({of_host})"


_GLANCE = Row(
    title="At a glance",
    panels=(
        facts_table(
            Look(
                title="What is being run",
                description="The facts of the trial that is running, or that ran last in the time "
                "shown.",
                unit="short",
                width=24,
                height=4,
            ),
            {"run": "Run", **{fact: fact.replace("_", " ").capitalize() for fact in FACTS}},
            (
                Column(
                    "Hosts",
                    f"count by (run, {', '.join(FACTS)}) "
                    f"(last_over_time(paceline_run_info{{{ONE}}}[$__range]))",
                    "short",
                ),
            ),
        ),
        figure(
            Look(
                title="Throughput",
                description="Samples trained per second, summed over all ranks.",
                unit="suffix:samples/s",
                width=4,
                height=5,
                decimals=1,
            ),
            Query(rate("paceline_training_samples_total", RANK, ("run",)), "{{run}}"),
        ),
        figure(
            Look(
                title="CPU idle",
                description="Share of the hosts' CPU time in which nothing ran, IOWait not "
                "counted. Much of it: cores that the training does not use.",
                unit="percentunit",
                steps=((0.3, ORANGE), (0.6, RED)),
                width=4,
                height=5,
                low=0,
                high=1,
            ),
            Query(_mean_share("idle"), "idle"),
        ),
        figure(
            Look(
                title="IOWait",
                description="Share of CPU time in which a CPU idled while I/O was pending.",
                unit="percentunit",
                steps=((0.05, ORANGE), (0.2, RED)),
                width=4,
                height=5,
                low=0,
                high=1,
            ),
            Query(_mean_share("iowait"), "IOWait"),
        ),
        figure(
            Look(
                title="Waiting for gradients",
                description="Share of the ranks' step time that is communication they could do "
                "nothing beside: waiting for the slowest rank, and transfer.",
                unit="percentunit",
                steps=((0.2, ORANGE), (0.5, RED)),
                width=4,
                height=5,
                low=0,
                high=1,
            ),
            Query(share(_PHASES, RANK, 'phase="comm"', ("run",)), "{{run}}"),
        ),
        figure(
            Look(
                title="Loss",
                description="Mean loss of the last step, averaged over the ranks that have one.",
                unit="none",
                width=4,
                height=5,
                decimals=3,
            ),
            Query(f"avg by (run) (paceline_training_loss{{{RANK}}})", "{{run}}"),
        ),
        figure(
            Look(
                title="Epoch",
                description="Epoch of the last step, from 0.",
                unit="none",
                width=4,
                height=5,
                decimals=0,
            ),
            Query(largest("paceline_training_epoch", RANK, ("run",)), "{{run}}"),
        ),
    ),
)

_CPU_ROW = Row(
    title="Is the CPU idle, and why",
    panels=(
        lines(
            Look(
                title="CPU idle and IOWait",
                description="The paper's figure: idle and IOWait by host. Idle without IOWait and "
                "with much communication means waiting for gradients; IOWait means reading.",
                unit="percentunit",
                steps=((0.6, RED),),
                width=12,
                low=0,
                high=1,
            ),
            Query(share(_CPU, HOST, 'mode="idle"', ("host",)), "idle, {{host}}"),
            Query(share(_CPU, HOST, 'mode="iowait"', ("host",)), "IOWait, {{host}}"),
        ),
        lines(
            Look(
                title="CPU time by state",
                description="All CPU time of the chosen hosts, by what it went to.",
                unit="percentunit",
                width=12,
                low=0,
                high=1,
            ),
            Query(
                f"sum by (mode) (rate({_CPU}{{{HOST}}}[$__rate_interval])) / scalar(sum(rate("
                f"{_CPU}{{{HOST}}}[$__rate_interval])))",
                "{{mode}}",
            ),
            stacked=True,
        ),
        lines(
            Look(
                title="Cores that the run uses",
                description="CPU time a second of the run's processes, beside the host's cores.",
                unit="suffix:cores",
                width=8,
                low=0,
                decimals=2,
            ),
            Query(rate("paceline_run_cpu_seconds_total", ONE, ("host", "run")), "used, {{host}}"),
            Query(largest("paceline_host_cpu_cores", HOST, ("host",)), "there are, {{host}}"),
        ),
        lines(
            Look(
                title="Cores that each rank uses",
                description="CPU time a second of each rank's processes. They add up to the run's, "
                "but for its launcher.",
                unit="suffix:cores",
                width=8,
                low=0,
                decimals=2,
            ),
            Query(
                rate("paceline_rank_cpu_seconds_total", RANK, ("host", "run", "rank")),
                _RANK_LEGEND,
            ),
        ),
        lines(
            Look(
                title="Cores, one by one",
                description="How busy each core was. A single busy one: work that is not shared "
                "out; or ranks bound to the same core.",
                width=8,
                low=0,
                high=1,
            ),
            Query(
                rate("paceline_host_core_busy_seconds_total", HOST, ("host", "core")),
                "core {{core}} of {{host}}",
            ),
        ),
    ),
)

_STEPS = Row(
    title="Where a step's time goes",
    panels=(
        lines(
            Look(
                title="Phases",
                description="Share of the ranks' step time by phase. comm is communication that "
                "the step waits for, bubble a pipeline's waiting for its neighbours, data_wait "
                "waiting for samples.",
                unit="percentunit",
                width=12,
                low=0,
                high=1,
            ),
            Query(split(_PHASES, RANK, "phase", ("run",)), "{{phase}}"),
            stacked=True,
        ),
        lines(
            Look(
                title="Waiting for gradients, by rank",
                description="Share of each rank's step time that is exposed communication. The "
                "rank that waits least is the one that the others wait for.",
                unit="percentunit",
                steps=((0.5, RED),),
                width=12,
                low=0,
                high=1,
            ),
            Query(share(_PHASES, RANK, 'phase="comm"', ("host", "run", "rank")), _RANK_LEGEND),
        ),
        lines(
            Look(
                title="A rank's own part of a step",
                description="Step time without communication and bubble: what the rank itself "
                "needs. The highest is the straggler.",
                unit="s",
                width=8,
                low=0,
            ),
            Query(own_step_seconds(), _RANK_LEGEND),
        ),
        lines(
            Look(
                title="Straggler",
                description="A rank's own part of a step over the mean of the other ranks. Above "
                "the line the alert PacelineStraggler fires.",
                unit="suffix:times",
                steps=((1.25, RED),),
                width=8,
                decimals=2,
            ),
            Query(against_others(), _RANK_LEGEND),
        ),
        lines(
            Look(
                title="Step time",
                description="Half and 95 % of the ranks' steps took at most as long, estimated "
                "within the buckets of a histogram.",
                unit="s",
                width=8,
                low=0,
            ),
            Query(quantile(0.5, ("run",)), "median"),
            Query(quantile(0.95, ("run",)), "95 %"),
        ),
    ),
)

_TRAINING = Row(
    title="Training",
    panels=(
        lines(
            Look(
                title="Throughput",
                description="Samples trained per second, by rank; padding is not counted.",
                unit="suffix:samples/s",
                width=8,
                low=0,
            ),
            Query(
                rate("paceline_training_samples_total", RANK, ("host", "run", "rank")), _RANK_LEGEND
            ),
            Query(rate("paceline_training_samples_total", RANK, ("run",)), "all"),
        ),
        lines(
            Look(
                title="Loss",
                description="Mean loss of each rank's share in its last step.",
                unit="none",
                width=8,
            ),
            Query(largest("paceline_training_loss", RANK, ("host", "run", "rank")), _RANK_LEGEND),
        ),
        lines(
            Look(
                title="Steps",
                description="Steps a second, by rank. All ranks of a training step together: one "
                "that lags shows as a gap, not as a lower line.",
                unit="suffix:steps/s",
                width=8,
                low=0,
            ),
            Query(
                rate("paceline_training_steps_total", RANK, ("host", "run", "rank")), _RANK_LEGEND
            ),
        ),
    ),
)

RUN = Page(
    title="Run",
    description="One run of Paceline, live: where its time goes, and what its hosts do meanwhile.",
    rows=(_GLANCE, _CPU_ROW, _STEPS, _TRAINING, MEMORY, THREADS, COMMUNICATION, FILES),
    one_run=True,
)
