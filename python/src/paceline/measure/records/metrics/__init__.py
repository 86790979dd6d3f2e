"""All metrics. To add one, declare it in `declared.py`; nothing else lists metrics."""

from paceline.measure.records.metrics.declared import METRICS, RUN_FACTS, SLOW_S
from paceline.measure.records.metrics.metric import (
    HOST,
    RANK,
    RUN,
    RUN_PROCESSES,
    SIDECAR,
    TRAINING,
    Metric,
    Scope,
)

__all__ = [
    "HOST",
    "METRICS",
    "RANK",
    "RUN",
    "RUN_FACTS",
    "RUN_PROCESSES",
    "SIDECAR",
    "SLOW_S",
    "TRAINING",
    "Metric",
    "Scope",
]
