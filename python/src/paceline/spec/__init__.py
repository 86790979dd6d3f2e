"""The spec: the user's request, frozen and validated, with all faults reported at once."""

from paceline.spec.loading import Spec, SpecSource, load_spec, shipped_experiments
from paceline.spec.models import (
    Experiment,
    Limits,
    TelemetrySettings,
    TrialRequest,
    TuneSettings,
    WorkloadRequest,
)
from paceline.spec.values import Device, MemoryFormat, Precision, ReadingMode

__all__ = [
    "Device",
    "Experiment",
    "Limits",
    "MemoryFormat",
    "Precision",
    "ReadingMode",
    "Spec",
    "SpecSource",
    "TelemetrySettings",
    "TrialRequest",
    "TuneSettings",
    "WorkloadRequest",
    "load_spec",
    "shipped_experiments",
]
