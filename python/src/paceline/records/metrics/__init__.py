"""All metrics. To add one, declare it in `declared.py`; nothing else lists metrics."""

from paceline.records.metrics.declared import (
    HOST_METRICS,
    RANK_METRICS,
    RUN_FACTS,
    RUN_METRICS,
    RUN_PROCESS_METRICS,
    SIDECAR_METRICS,
    SLOW_S,
    TRAINING_METRICS,
)
from paceline.records.metrics.metric import (
    CGROUP,
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
    "CGROUP",
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

METRICS: tuple[Metric, ...] = (
    *HOST_METRICS,
    *RUN_METRICS,
    *RUN_PROCESS_METRICS,
    *RANK_METRICS,
    *TRAINING_METRICS,
    *SIDECAR_METRICS,
)
