"""Metrics of a run's processes, of each rank's processes, and of the sidecar itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.telemetry.metrics.metric import RANK, RUN, RUN_PROCESSES, SIDECAR, Kind, Metric

if TYPE_CHECKING:
    from paceline.plan.trial import Trial
    from paceline.telemetry.processes import Usage

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReading:
    """Facts of the trial."""

    facts: dict[str, str]
    launched_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarReading:
    """Figures of the sidecar itself."""

    unix_s: float
    version: str | None  # None: unknown
    interval_s: float
    restarts: int
    samples: int
    missed: int
    cpu_s: float
    rss_bytes: int


def _usage(
    kind: Kind, name: str, column: str, read: Callable[[Usage], Any], text: str
) -> tuple[Metric, Metric]:
    """Return the same metric of the whole run and of each rank."""
    return (
        Metric(f"run_{name}", kind, RUN_PROCESSES, text, read, f"run_{column}"),
        Metric(f"rank_{name}", kind, RANK, text, read, column),
    )


# fmt: off
_USAGE_METRICS = (
    _usage("gauge", "processes", "processes", lambda of: of.processes,
        "Live processes."),
    _usage("gauge", "threads", "threads", lambda of: of.threads,
        "Threads of the live processes."),
    _usage("counter", "cpu_seconds", "cpu_seconds", lambda of: of.cpu_seconds,
        "CPU time since the trial's sidecar started, including ended processes. The time that a "
        "process used between the last tick and its end is included only if its parent is watched"
        " and waited for it."),
    _usage("gauge", "resident_memory_bytes", "rss_bytes", lambda of: of.rss_bytes,
        "Sum of the resident set sizes (RSS); shared pages count once for each process."),
    _usage("gauge", "proportional_memory_bytes", "pss_bytes", lambda of: of.pss_bytes,
        "Sum of the proportional set sizes (PSS); each shared page counts once. Read at the "
        "expensive interval."),
    _usage("counter", "context_switches", "{kind}_context_switches",
        lambda of: {"voluntary": of.voluntary_switches, "involuntary": of.involuntary_switches},
        "Context switches of all threads since the trial's sidecar started, by kind (voluntary, "
        "involuntary). Read at the expensive interval."),
    _usage("counter", "read_bytes", "read_bytes", lambda of: of.read_bytes,
        "Bytes read from storage since the trial's sidecar started."),
    _usage("counter", "written_bytes", "written_bytes", lambda of: of.written_bytes,
        "Bytes written to storage since the trial's sidecar started."),
    _usage("gauge", "open_files", "open_files", lambda of: of.open_files,
        "Open file descriptors. Read at the expensive interval."),
)
RUN_METRICS = (
    Metric("run", "info", RUN,
        "Facts of the trial; always 1.", lambda run: run.facts, info_labels=RUN_FACTS,
        in_trace=False),
    Metric("run_start_timestamp_seconds", "gauge", RUN,
        "Unix time at which the trial was launched.", lambda run: run.launched_unix_s,
        in_trace=False),
)
# fmt: on
RUN_PROCESS_METRICS = tuple(run for run, _ in _USAGE_METRICS)
RANK_METRICS = tuple(rank for _, rank in _USAGE_METRICS)


def _sidecar(
    kind: Kind, name: str, read: Callable[[SidecarReading], Any], text: str, **more: Any
) -> Metric:
    return Metric(f"sidecar{name}", kind, SIDECAR, text, read, **more)


# fmt: off
SIDECAR_METRICS = (
    _sidecar("info", "", lambda sidecar: sidecar.version,
        "Version of the sidecar; always 1.", info_labels=("version",), in_trace=False),
    _sidecar("gauge", "_interval_seconds", lambda sidecar: sidecar.interval_s,
        "Time between two samples.", in_trace=False),
    _sidecar("counter", "_restarts", lambda sidecar: sidecar.restarts,
        "Times that the sidecar died and was started again.", in_trace=False),
    _sidecar("counter", "_samples", lambda sidecar: sidecar.samples,
        "Samples taken.", in_trace=False),
    _sidecar("counter", "_missed_samples", lambda sidecar: sidecar.missed,
        "Samples that could not be taken in time.", column="sidecar_missed_ticks"),
    _sidecar("counter", "_cpu_seconds", lambda sidecar: sidecar.cpu_s,
        "CPU time of the sidecar."),
    _sidecar("gauge", "_resident_memory_bytes", lambda sidecar: sidecar.rss_bytes,
        "Resident memory of the sidecar.", column="sidecar_rss_bytes"),
    _sidecar("gauge", "_last_sample_timestamp_seconds", lambda sidecar: sidecar.unix_s,
        "Unix time of the last sample.", column="unix_s"),
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
