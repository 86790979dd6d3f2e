"""Metrics of a run's processes, of each rank's processes, and of the sidecar itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.telemetry.metrics.metric import (
    RANK,
    RUN,
    RUN_PROCESSES,
    SIDECAR,
    Kind,
    Metric,
    Unit,
)

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
    name: str,
    kind: Kind,
    unit: Unit,
    text: str,
    read: Callable[[Usage], Any],
    column: str,
    labels: tuple[str, ...] = (),
) -> tuple[Metric, Metric]:
    """Return the same metric of the whole run and of each rank."""

    def metric(prefix: str, scope: Any, column: str) -> Metric:
        return Metric(
            name=f"{prefix}_{name}",
            kind=kind,
            scope=scope,
            unit=unit,
            help=text,
            read=read,
            labels=labels,
            column=(column,),
        )

    return metric("run", RUN_PROCESSES, f"run_{column}"), metric("rank", RANK, column)


_USAGE_METRICS = (
    _usage("processes", "gauge", "", "Live processes.", lambda of: of.processes, "processes"),
    _usage(
        "threads", "gauge", "", "Threads of the live processes.", lambda of: of.threads, "threads"
    ),
    _usage(
        "cpu_seconds",
        "counter",
        "seconds",
        "CPU time since the trial's sidecar started, including ended processes. The time that a "
        "process used between the last tick and its end is included only if its parent is "
        "watched and waited for it.",
        lambda of: of.cpu_seconds,
        "cpu_seconds",
    ),
    _usage(
        "resident_memory_bytes",
        "gauge",
        "bytes",
        "Sum of the resident set sizes (RSS); shared pages count once for each process.",
        lambda of: of.rss_bytes,
        "rss_bytes",
    ),
    _usage(
        "proportional_memory_bytes",
        "gauge",
        "bytes",
        "Sum of the proportional set sizes (PSS); each shared page counts once. Read at the "
        "expensive interval.",
        lambda of: of.pss_bytes,
        "pss_bytes",
    ),
    _usage(
        "context_switches",
        "counter",
        "",
        "Context switches of all threads since the trial's sidecar started, by kind (voluntary, "
        "involuntary). Read at the expensive interval.",
        lambda of: {"voluntary": of.voluntary_switches, "involuntary": of.involuntary_switches},
        "{kind}_context_switches",
        ("kind",),
    ),
    _usage(
        "read_bytes",
        "counter",
        "bytes",
        "Bytes read from storage since the trial's sidecar started.",
        lambda of: of.read_bytes,
        "read_bytes",
    ),
    _usage(
        "written_bytes",
        "counter",
        "bytes",
        "Bytes written to storage since the trial's sidecar started.",
        lambda of: of.written_bytes,
        "written_bytes",
    ),
    _usage(
        "open_files",
        "gauge",
        "",
        "Open file descriptors. Read at the expensive interval.",
        lambda of: of.open_files,
        "open_files",
    ),
)


def _run(
    name: str, kind: Kind, text: str, read: Callable[[RunReading], Any], **more: Any
) -> Metric:
    return Metric(
        name=f"run{name}",
        kind=kind,
        scope=RUN,
        unit="seconds" if name.endswith("seconds") else "",
        help=text,
        read=read,
        in_trace=False,
        **more,
    )


RUN_METRICS = (
    _run(
        "",
        "info",
        "Facts of the trial; always 1.",
        lambda run: run.facts,
        info_labels=RUN_FACTS,
    ),
    _run(
        "_start_timestamp_seconds",
        "gauge",
        "Unix time at which the trial was launched.",
        lambda run: run.launched_unix_s,
    ),
)
RUN_PROCESS_METRICS = tuple(run for run, _ in _USAGE_METRICS)
RANK_METRICS = tuple(rank for _, rank in _USAGE_METRICS)


def _sidecar(
    name: str, kind: Kind, unit: Unit, text: str, read: Callable[[SidecarReading], Any], **more: Any
) -> Metric:
    return Metric(
        name=f"sidecar{name}", kind=kind, scope=SIDECAR, unit=unit, help=text, read=read, **more
    )


SIDECAR_METRICS = (
    _sidecar(
        "",
        "info",
        "",
        "Version of the sidecar; always 1.",
        lambda sidecar: sidecar.version,
        info_labels=("version",),
        in_trace=False,
    ),
    _sidecar(
        "_interval_seconds",
        "gauge",
        "seconds",
        "Time between two samples.",
        lambda sidecar: sidecar.interval_s,
        in_trace=False,
    ),
    _sidecar(
        "_restarts",
        "counter",
        "",
        "Times that the sidecar died and was started again.",
        lambda sidecar: sidecar.restarts,
        in_trace=False,
    ),
    _sidecar(
        "_samples", "counter", "", "Samples taken.", lambda sidecar: sidecar.samples, in_trace=False
    ),
    _sidecar(
        "_missed_samples",
        "counter",
        "",
        "Samples that could not be taken in time.",
        lambda sidecar: sidecar.missed,
        column=("sidecar_missed_ticks",),
    ),
    _sidecar(
        "_cpu_seconds",
        "counter",
        "seconds",
        "CPU time of the sidecar.",
        lambda sidecar: sidecar.cpu_s,
    ),
    _sidecar(
        "_resident_memory_bytes",
        "gauge",
        "bytes",
        "Resident memory of the sidecar.",
        lambda sidecar: sidecar.rss_bytes,
        column=("sidecar_rss_bytes",),
    ),
    _sidecar(
        "_last_sample_timestamp_seconds",
        "gauge",
        "seconds",
        "Unix time of the last sample.",
        lambda sidecar: sidecar.unix_s,
        column=("unix_s",),
    ),
)


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
