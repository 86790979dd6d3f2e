"""What was asked: frozen, validated, every fault reported at once."""

from paceline.spec.loading import load_spec, shipped_experiments
from paceline.spec.models import (
    Experiment,
    Limits,
    MpiSettings,
    SparkSettings,
    TelemetrySettings,
    TrialRequest,
    WorkloadRequest,
)
from paceline.spec.values import (
    Launcher,
    LocalStrategy,
    MemoryFormat,
    Precision,
    ReadingMode,
    Transport,
    WorkloadName,
)
from paceline.spec.workloads import WORKLOADS, WorkloadDefaults

__all__ = [
    "WORKLOADS",
    "Experiment",
    "Launcher",
    "Limits",
    "LocalStrategy",
    "MemoryFormat",
    "MpiSettings",
    "Precision",
    "ReadingMode",
    "SparkSettings",
    "TelemetrySettings",
    "Transport",
    "TrialRequest",
    "WorkloadDefaults",
    "WorkloadName",
    "WorkloadRequest",
    "load_spec",
    "shipped_experiments",
]
