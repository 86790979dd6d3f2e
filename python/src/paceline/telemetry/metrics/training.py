"""Metrics of training progress, read from the rows that the ranks write."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.telemetry.metrics.metric import TRAINING, Distribution, Kind, Metric
from paceline.telemetry.training import STEP_SECONDS_BUCKETS

if TYPE_CHECKING:
    from paceline.telemetry.training import OperationTotals, TrainingProgress


def _training(
    kind: Kind, name: str, read: Callable[[TrainingProgress], Any], text: str, column: str = ""
) -> Metric:
    return Metric(name, kind, TRAINING, text, read, column, in_trace=False)


def _communication(name: str, read: Callable[[OperationTotals], Any], text: str) -> Metric:
    return _training(
        "counter",
        f"communication_{name}",
        lambda of: {operation: read(totals) for operation, totals in of.operations.items()},
        text,
        f"operations.{{operation}}.{name}",
    )


# fmt: off
TRAINING_METRICS = (
    _training("gauge", "rank_failed", lambda of: int(of.failed),
        "1 if the rank ended with an error, else 0."),
    _training("counter", "training_steps", lambda of: of.steps,
        "Steps that the rank finished."),
    _training("counter", "training_samples", lambda of: of.samples,
        "Samples of the rank's shards of the batches, without padding."),
    _training("gauge", "training_epoch", lambda of: of.epoch,
        "Epoch of the last step, from 0."),
    _training("gauge", "training_loss", lambda of: of.loss,
        "Mean loss of the rank's samples in the last step."),
    _training("gauge", "training_last_step_timestamp_seconds", lambda of: of.last_step_ended_unix_s,
        "Unix time at which the rank finished its last step."),
    _training("counter", "training_phase_seconds", lambda of: of.phase_s,
        "Time of the rank's steps, by phase: comm is exposed communication; bubble is a pipeline "
        "stage waiting for its neighbours.", "phases.{phase}"),
    _training("histogram", "training_step_seconds",
        lambda of: Distribution(STEP_SECONDS_BUCKETS, tuple(of.step_counts), of.step_s_sum),
        "Duration of the rank's steps."),
    _communication("operations", lambda totals: totals.operations,
        "Finished operations of process groups, by operation."),
    _communication("payload_bytes", lambda totals: totals.payload_bytes,
        "Size of the tensors of these operations, by operation."),
    _communication("sent_bytes", lambda totals: totals.sent_bytes,
        "Bytes that the rank sent for these operations, by operation, where the transport counts "
        "them."),
    _communication("seconds", lambda totals: totals.seconds,
        "Time from the request for an operation to its end, including time that overlaps with "
        "computation, by operation."),
)
# fmt: on
