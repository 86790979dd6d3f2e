"""*Compare*: trials side by side, Spark against MPI, by local strategy.

Figures are means over the time shown in which a trial ran. They are for looking; which is faster,
and whether the difference is more than noise, `paceline compare` says.
"""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import bargauge
from monitoring.dashboards.panels import (
    ORANGE,
    RED,
    Column,
    Page,
    Query,
    Row,
    bars,
    facts_table,
    lines,
)
from monitoring.dashboards.queries import (
    FACTS,
    HOST,
    NAME,
    RANK,
    WINDOW,
    by_trial,
    largest,
    over_time,
    rate,
    share,
    total,
)
from monitoring.dashboards.queries import RUN as RUNS

_KEYS = ("host", "run")
_PHASES = "paceline_training_phase_seconds_total"
# Samples over the time of the ranks' steps. It is also correct at the start and end of a trial,
# where the window of a rate contains time outside of the trial.
_IN_STEPS = f"avg by (host, run) (rate(paceline_training_step_seconds_sum{{{RANK}}}[{WINDOW}]))"
_SAMPLES = f"{rate('paceline_training_samples_total', RANK, _KEYS)} / ({_IN_STEPS} > 0)"
_SAMPLES_PER_S = by_trial("sum", _SAMPLES)
_IN_TRAINING = by_trial("sum", f"{_IN_STEPS} > 0")


def _host_share(mode: str) -> str:
    """Return the share of a mode in the CPU time of the hosts of each run."""
    return _of_runs(share("paceline_host_cpu_seconds_total", HOST, f'mode="{mode}"', ("host",)))


def _of_runs(of_host: str) -> str:
    """Return values by host for each run on it."""
    return (
        f"(max by (host, run) (paceline_run_processes{{{RUNS}}}) * 0 + 1) "
        f"* on (host) group_left () ({of_host})"
    )


def _while_training(per_trial: str) -> str:
    """Leave out launch, imports and data loading, which take longer under some launchers."""
    return f"({per_trial}) and on (run, trial) ({_IN_TRAINING})"


_IDLE = _while_training(by_trial("avg", _host_share("idle")))
_IOWAIT = _while_training(by_trial("avg", _host_share("iowait")))
_USED, _SIZE = (
    largest(f"paceline_host_memory_{what}_bytes", HOST, ("host",)) for what in ("used", "size")
)
_RAM = _while_training(by_trial("avg", _of_runs(f"{_USED} / {_SIZE}")))
_COMM = by_trial("avg", share(_PHASES, RANK, 'phase="comm"', _KEYS))
_CORES = _while_training(by_trial("sum", rate("paceline_run_cpu_seconds_total", RUNS, _KEYS)))
_THREADS = _while_training(by_trial("sum", total("paceline_run_threads", RUNS, _KEYS)))
# it has no value until its first reading, some time after the start of a trial
_MEMORY = by_trial("sum", f"{total('paceline_run_proportional_memory_bytes', RUNS, _KEYS)} >= 0")
_SENT = by_trial("sum", rate("paceline_communication_payload_bytes_total", RANK, _KEYS))
_STEP = by_trial(
    "max",
    f"{rate('paceline_training_step_seconds_sum', RANK, _KEYS)} / "
    f"({rate('paceline_training_step_seconds_count', RANK, _KEYS)} > 0)",
)
_SHARES = (("CPU idle", _IDLE), ("IOWait", _IOWAIT), ("Waiting for gradients", _COMM))


def _by(facts: str, per_trial: str) -> str:
    """Return the mean of the trials' means, by some of their facts."""
    return f"avg by ({facts}) ({over_time('avg', per_trial)})"


def _speedup() -> str:
    """Return the throughput of each strategy and number of nodes over that of the baseline."""
    trained = by_trial("sum", _SAMPLES, ("workload", *FACTS))
    facts = 'launcher="local",local_strategy="sequential"'
    baseline = f"({trained}) and on (run, trial) paceline_run_info{{{RUNS},{facts}}}"
    every = _by("workload, launcher, transport, local_strategy, nodes", trained)
    return f"{every} / on (workload) group_left () {_by('workload', baseline)}"


_SIDE_BY_SIDE = Row(
    title="Trials side by side",
    panels=(
        facts_table(
            "Trials",
            "Means over the selected time in which each trial trained; memory is the maximum. "
            "Waiting is the share of step time spent on gradients. Click a column heading to "
            "sort.",
            {"run": "Run", "trial": "Trial"},
            (
                Column("Samples/s", over_time("avg", _SAMPLES_PER_S), "none"),
                Column("Step", over_time("avg", _STEP), "s"),
                Column("CPU idle", over_time("avg", _IDLE), "percentunit"),
                Column("IOWait", over_time("avg", _IOWAIT), "percentunit"),
                Column("Waiting", over_time("avg", _COMM), "percentunit"),
                Column("Cores used", over_time("avg", _CORES), "short"),
                Column("Threads", over_time("avg", _THREADS), "short"),
                Column("Peak RAM", over_time("max", _MEMORY), "bytes"),
                Column("Payload", over_time("avg", _SENT), "Bps"),
            ),
            # the name of a trial contains them, and the table would be wider than a screen
            hidden=[fact for fact in FACTS if fact != "trial"],
            width=24,
            height=9,
        ),
        bars(
            "Throughput",
            "Samples trained per second, mean over the training of the trial.",
            Query(over_time("avg", _SAMPLES_PER_S), NAME),
            unit="suffix:samples/s",
            width=12,
            height=10,
            decimals=1,
        ),
        bars(
            "Waiting for gradients",
            "Exposed communication as a share of step time, mean.",
            Query(over_time("avg", _COMM), NAME),
            steps=((0.2, ORANGE), (0.5, RED)),
            width=12,
            height=10,
            share=True,
        ),
    ),
)

_LAUNCHERS = Row(
    title="Spark against MPI",
    panels=(
        bars(
            "Throughput by launcher, transport, strategy and ranks",
            "The mean of the trials that differ only in the repeat. Trials with "
            "another local strategy or number of ranks have a bar of their own, so that like "
            "is compared with like.",
            Query(
                _by("launcher, transport, local_strategy, ranks", _SAMPLES_PER_S),
                "{{launcher}} · {{transport}} · {{local_strategy}} · ranks {{ranks}}",
            ),
            unit="suffix:samples/s",
            height=10,
            decimals=1,
        ),
        bars(
            "Idle, IOWait and waiting for gradients by launcher",
            "Shares of CPU time (idle, IOWait) and of step time (waiting), means of the "
            "trials under each launcher.",
            *(
                Query(_by("launcher", per_trial), f"{name}, {{{{launcher}}}}")
                for name, per_trial in _SHARES
            ),
            steps=((0.5, ORANGE),),
            height=10,
            share=True,
        ),
        bars(
            "Memory by launcher",
            "Proportional memory of all processes of the trial on all hosts, mean of the trials.",
            Query(_by("launcher", _MEMORY), "{{launcher}}"),
            unit="bytes",
            height=10,
        ),
    ),
)


def _by_strategy(name: str, text: str, per_trial: str, **options: Any) -> bargauge.Panel:
    """Draw the mean of a trace over the trials of each local strategy."""
    query = Query(_by("local_strategy", per_trial), "{{local_strategy}}")
    return bars(f"{name} by local strategy", text, query, height=9, **options)


_STRATEGIES = Row(
    title="By local strategy",
    panels=(
        bars(
            "Speedup on one node and on several",
            "Throughput over that of the sequential baseline, mean of the trials. Does the best "
            "local strategy on one node stay the best on several?",
            Query(
                _speedup(),
                "{{workload}} · {{local_strategy}} · {{launcher}} · {{transport}} · "
                "nodes {{nodes}}",
            ),
            unit="none",
            width=12,
            height=9,
            decimals=2,
        ),
        _by_strategy(
            "CPU idle",
            "Share of the hosts' CPU time in which nothing ran.",
            _IDLE,
            steps=((0.3, ORANGE), (0.6, RED)),
            width=12,
            share=True,
        ),
        _by_strategy(
            "IOWait",
            "Share of the hosts' CPU time that idled while I/O was pending.",
            _IOWAIT,
            steps=((0.2, RED),),
            share=True,
        ),
        _by_strategy(
            "RAM",
            "Share of the hosts' memory that is not available without swapping.",
            _RAM,
            steps=((0.9, RED),),
            share=True,
        ),
        _by_strategy(
            "Threads",
            "Threads of all processes of the trial on all hosts.",
            _THREADS,
            unit="short",
            decimals=0,
        ),
    ),
)


_COURSES = (
    ("Throughput", "Samples trained per second.", "suffix:samples/s", _SAMPLES_PER_S),
    ("CPU idle", "Share of CPU time in which nothing ran.", "percentunit", _IDLE),
    ("IOWait", "Share of CPU time that idled while I/O was pending.", "percentunit", _IOWAIT),
    ("Waiting for gradients", "Exposed communication in step time.", "percentunit", _COMM),
    ("Threads", "Threads of all processes on all hosts.", "short", _THREADS),
    ("Memory", "Proportional memory of all processes on all hosts.", "bytes", _MEMORY),
)
_OVER_TIME = Row(
    title="Over time",
    panels=tuple(
        lines(title, text, Query(per_trial, NAME), unit=unit, width=12)
        for title, text, unit, per_trial in _COURSES
    ),
)

COMPARE = Page(
    title="Compare",
    description="Trials of Paceline side by side: Spark against MPI, and by local strategy.",
    rows=(_SIDE_BY_SIDE, _LAUNCHERS, _STRATEGIES, _OVER_TIME),
    one_run=False,
    since="now-6h",
    epochs=False,
    refresh="30s",
)
