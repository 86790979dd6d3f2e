"""A snapshot of a sidecar, and the series that a scrape of it shows."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from paceline.measure.records.metrics import METRICS
from paceline.measure.telemetry.exporter import LatestSnapshot, Snapshot
from paceline.measure.telemetry.training import OperationTotals, TrainingProgress

SNAPSHOT = Snapshot(
    host="node-1",
    run="quick",
    row={
        "unix_s": 1700000000.5,
        "cpu_seconds": {"user": 1.5, "idle": 3.0},
        "ram_used_bytes": 100,
        "gpus": {"0": {"name": "H200", "utilization_ratio": 0.25}},
        "cgroup": {"cpu_limit_cores": 1.5},
        "run": {"trial": "t", "launcher": "mpi"},
        "run_processes": 2,
        "run_pss_bytes": None,
        "run_voluntary_context_switches": 7,
    },
    ranks={1: {"rank": 1, "pid": 4711, "cpu_seconds": 2.5, "threads": 3}},
    training={
        1: TrainingProgress(
            steps=3,
            samples=48,
            loss=2.25,
            step_counts=[1, 0, 0, 2, *[0] * 9],
            step_s_sum=0.25,
            operations={"allreduce": OperationTotals(operations=4, seconds=0.5)},
        ).row()
    },
)


def served() -> LatestSnapshot:
    source = LatestSnapshot(METRICS)
    source.update(SNAPSHOT)
    return source


def values(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
