"""Metrics of training progress, read from the rows that the ranks write."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.telemetry.metrics.metric import TRAINING, Distribution, Kind, Metric, Unit

if TYPE_CHECKING:
    from paceline.telemetry.training import OperationTotals, TrainingProgress

STEP_SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def _training(
    name: str,
    kind: Kind,
    unit: Unit,
    text: str,
    read: Callable[[TrainingProgress], Any],
    *column: str,
    labels: tuple[str, ...] = (),
) -> Metric:
    return Metric(
        name=name,
        kind=kind,
        scope=TRAINING,
        unit=unit,
        help=text,
        read=read,
        column=column,
        labels=labels,
        in_trace=False,
    )


def _communication(
    name: str, unit: Unit, text: str, read: Callable[[OperationTotals], Any]
) -> Metric:
    return _training(
        f"communication_{name}",
        "counter",
        unit,
        text,
        lambda of: {operation: read(totals) for operation, totals in of.operations.items()},
        "operations",
        "{operation}",
        name,
        labels=("operation",),
    )


TRAINING_METRICS = (
    _training(
        "rank_failed",
        "gauge",
        "",
        "1 if the rank ended with an error, else 0.",
        lambda of: int(of.failed),
    ),
    _training(
        "training_steps", "counter", "", "Steps that the rank finished.", lambda of: of.steps
    ),
    _training(
        "training_samples",
        "counter",
        "",
        "Samples of the rank's shards of the batches, without padding.",
        lambda of: of.samples,
    ),
    _training(
        "training_epoch", "gauge", "", "Epoch of the last step, from 0.", lambda of: of.epoch
    ),
    _training(
        "training_loss",
        "gauge",
        "",
        "Mean loss of the rank's samples in the last step.",
        lambda of: of.loss,
    ),
    _training(
        "training_last_step_timestamp_seconds",
        "gauge",
        "seconds",
        "Unix time at which the rank finished its last step.",
        lambda of: of.last_step_ended_unix_s,
    ),
    _training(
        "training_phase_seconds",
        "counter",
        "seconds",
        "Time of the rank's steps, by phase: comm is exposed communication; bubble is a pipeline "
        "stage waiting for its neighbours.",
        lambda of: of.phase_s,
        "phases",
        "{phase}",
        labels=("phase",),
    ),
    _training(
        "training_step_seconds",
        "histogram",
        "seconds",
        "Duration of the rank's steps.",
        lambda of: Distribution(STEP_SECONDS_BUCKETS, tuple(of.step_counts), of.step_s_sum),
    ),
    _communication(
        "operations",
        "",
        "Finished operations of process groups, by operation.",
        lambda totals: totals.operations,
    ),
    _communication(
        "payload_bytes",
        "bytes",
        "Size of the tensors of these operations, by operation.",
        lambda totals: totals.payload_bytes,
    ),
    _communication(
        "sent_bytes",
        "bytes",
        "Bytes that the rank sent for these operations, by operation, where the transport counts "
        "them.",
        lambda totals: totals.sent_bytes,
    ),
    _communication(
        "seconds",
        "seconds",
        "Time from the request for an operation to its end, including time that overlaps with "
        "computation, by operation.",
        lambda totals: totals.seconds,
    ),
)
