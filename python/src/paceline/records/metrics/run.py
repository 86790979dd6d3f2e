"""Metrics of a run's processes, of each rank's processes, and of the sidecar itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.records.metrics.metric import RANK, RUN, RUN_PROCESSES, SIDECAR, Kind, Metric, Row

if TYPE_CHECKING:
    from paceline.plan.trial import Trial

# Facts of a trial, as labels of `paceline_run_info`.
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


def _usage(kind: Kind, name: str, column: str, text: str, **more: Any) -> tuple[Metric, Metric]:
    """Return the same metric of the whole run and of each rank."""
    return (
        Metric(f"run_{name}", kind, RUN_PROCESSES, text, f"run_{column}", **more),
        Metric(f"rank_{name}", kind, RANK, text, column, **more),
    )


# fmt: off
_USAGE_METRICS = (
    _usage("gauge", "processes", "processes",
        "Live processes.", required=True),
    _usage("gauge", "threads", "threads",
        "Threads of the live processes.", required=True),
    _usage("counter", "cpu_seconds", "cpu_seconds",
        "CPU time since the trial's sidecar started, including ended processes. The time that a "
        "process used between the last tick and its end is included only if its parent is watched"
        " and waited for it.", required=True),
    _usage("gauge", "resident_memory_bytes", "rss_bytes",
        "Sum of the resident set sizes (RSS); shared pages count once for each process.",
        required=True),
    _usage("gauge", "proportional_memory_bytes", "pss_bytes",
        "Sum of the proportional set sizes (PSS); each shared page counts once. Read at the "
        "expensive interval."),
    _usage("counter", "context_switches", "{kind}_context_switches",
        "Context switches of all threads since the trial's sidecar started, by kind (voluntary, "
        "involuntary). Read at the expensive interval.",
        label_values=("voluntary", "involuntary")),
    _usage("counter", "read_bytes", "read_bytes",
        "Bytes read from storage since the trial's sidecar started."),
    _usage("counter", "written_bytes", "written_bytes",
        "Bytes written to storage since the trial's sidecar started."),
    _usage("gauge", "open_files", "open_files",
        "Open file descriptors. Read at the expensive interval."),
)
RUN_METRICS = (
    Metric("run", "info", RUN,
        "Facts of the trial; always 1.", info_labels=RUN_FACTS, in_trace=False),
    Metric("run_start_timestamp_seconds", "gauge", RUN,
        "Unix time at which the trial was launched.", in_trace=False),
)
# fmt: on
RUN_PROCESS_METRICS = tuple(run for run, _ in _USAGE_METRICS)
RANK_METRICS = tuple(rank for _, rank in _USAGE_METRICS)


def _sidecar(kind: Kind, name: str, text: str, **more: Any) -> Metric:
    return Metric(f"sidecar{name}", kind, SIDECAR, text, **more)


# fmt: off
SIDECAR_METRICS = (
    _sidecar("info", "",
        "Version of the sidecar; always 1.", info_labels=("version",), in_trace=False),
    _sidecar("gauge", "_interval_seconds",
        "Time between two samples.", in_trace=False),
    _sidecar("counter", "_restarts",
        "Times that the sidecar died and was started again.", in_trace=False),
    _sidecar("counter", "_samples",
        "Samples taken.", in_trace=False),
    _sidecar("counter", "_missed_samples",
        "Samples that could not be taken in time.", column="sidecar_missed_ticks"),
    _sidecar("counter", "_cpu_seconds",
        "CPU time of the sidecar.", required=True),
    _sidecar("gauge", "_resident_memory_bytes",
        "Resident memory of the sidecar.", column="sidecar_rss_bytes", required=True),
    _sidecar("gauge", "_last_sample_timestamp_seconds",
        "Unix time of the last sample.", column="unix_s", required=True),
)
# fmt: on


def facts_of(trial: Trial) -> dict[str, str]:
    """Return the facts of a trial by the labels in RUN_FACTS."""
    return {
        "trial": trial.id,
        "workload": trial.training.workload,
        "launcher": trial.launcher,
        "transport": trial.transport,
        "local_strategy": trial.local_strategy,
        "nodes": str(trial.placement.nodes),
        "ranks": str(trial.placement.ranks),
        "repeat": str(trial.repeat),
    }


def run_facts(facts: dict[str, str], launched_unix_s: float) -> Row:
    """Return the values of the run's metrics, which the trace does not repeat."""
    return {"run": facts, "run_start_timestamp_seconds": launched_unix_s}


def sidecar_facts(*, version: str | None, interval_s: float, restarts: int, samples: int) -> Row:
    """Return the values of the sidecar's metrics that the trace does not repeat."""
    return {
        "sidecar": version,
        "sidecar_interval_seconds": interval_s,
        "sidecar_restarts": restarts,
        "sidecar_samples": samples,
    }
