"""What was asked: frozen, validated, every fault reported at once."""

from paceline.spec.loading import load_spec, shipped_experiments
from paceline.spec.models import (
    Experiment,
    Limits,
    MpiSettings,
    SparkSettings,
    TelemetrySettings,
    TrialRequest,
    TuneSettings,
    WorkloadRequest,
)
from paceline.spec.values import (
    Balance,
    Device,
    Launcher,
    LocalStrategy,
    MemoryFormat,
    PipelineSchedule,
    Precision,
    ReadingMode,
    Reduction,
    StrategyRequest,
    Transport,
    WorkloadName,
)
from paceline.spec.workloads import WORKLOADS, WorkloadDefaults

__all__ = [
    "WORKLOADS",
    "Balance",
    "Device",
    "Experiment",
    "Launcher",
    "Limits",
    "LocalStrategy",
    "MemoryFormat",
    "MpiSettings",
    "PipelineSchedule",
    "Precision",
    "ReadingMode",
    "Reduction",
    "SparkSettings",
    "StrategyRequest",
    "TelemetrySettings",
    "Transport",
    "TrialRequest",
    "TuneSettings",
    "WorkloadDefaults",
    "WorkloadName",
    "WorkloadRequest",
    "load_spec",
    "shipped_experiments",
]
