"""The spec: the user's request, frozen and validated, with all faults reported at once."""

from paceline.plan.spec.loading import Spec, SpecSource, load_spec, shipped_experiments
from paceline.plan.spec.models import (
    Experiment,
    TelemetrySettings,
    TrialRequest,
    TuneSettings,
    WorkloadRequest,
)

__all__ = [
    "Experiment",
    "Spec",
    "SpecSource",
    "TelemetrySettings",
    "TrialRequest",
    "TuneSettings",
    "WorkloadRequest",
    "load_spec",
    "shipped_experiments",
]
