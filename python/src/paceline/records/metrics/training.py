"""Metrics of training progress, read from the rows that the ranks write."""

from __future__ import annotations

from paceline.records.metrics.metric import TRAINING, Kind, Metric


def _training(kind: Kind, name: str, text: str, column: str = "") -> Metric:
    return Metric(name, kind, TRAINING, text, column, in_trace=False)


def _communication(name: str, text: str) -> Metric:
    column = f"operations.{{operation}}.{name}"
    return _training("counter", f"communication_{name}", text, column)


# fmt: off
TRAINING_METRICS = (
    _training("gauge", "rank_failed",
        "1 if the rank ended with an error, else 0."),
    _training("counter", "training_steps",
        "Steps that the rank finished."),
    _training("counter", "training_samples",
        "Samples of the rank's shards of the batches, without padding."),
    _training("gauge", "training_epoch",
        "Epoch of the last step, from 0."),
    _training("gauge", "training_loss",
        "Mean loss of the rank's samples in the last step."),
    _training("gauge", "training_last_step_timestamp_seconds",
        "Unix time at which the rank finished its last step."),
    _training("counter", "training_phase_seconds",
        "Time of the rank's steps, by phase: comm is exposed communication; bubble is a pipeline "
        "stage waiting for its neighbours.", "phases.{phase}"),
    _training("histogram", "training_step_seconds",
        "Duration of the rank's steps."),
    _communication("operations",
        "Finished operations of process groups, by operation."),
    _communication("payload_bytes",
        "Size of the tensors of these operations, by operation."),
    _communication("sent_bytes",
        "Bytes that the rank sent for these operations, by operation, where the transport counts "
        "them."),
    _communication("seconds",
        "Time from the request for an operation to its end, including time that overlaps with "
        "computation, by operation."),
)
# fmt: on
