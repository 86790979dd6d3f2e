"""The disk use of a run, from the numbers of steps, ranks and parameters: arithmetic only.

Rows are JSON lines while their trial trains, and smaller Parquet files afterwards. The sizes of
rows and files are rounded means of real runs on a host with two cores; tests compare predictions
with real runs. The traces of sidecars grow with the time of the training, which is not known
before, so they are given as a rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.records.checkpoints import KEPT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.plan.trial import Trial

# Manifest, comparison and report; the report holds the library that draws its figures.
_RUN_BYTES = 4_800_000
_CONFIGURATION_BYTES = 80_000
_TRIAL_BYTES = 6_000  # descriptions and outcome
_RANK_BYTES = 2_000
_HOST_BYTES = 6_000
_HOST_RANK_BYTES = 3_700  # of a rank in the last values of the sidecar


@dataclass(frozen=True, slots=True)
class _Rows:
    """Bytes of a file of rows: JSON lines; then the same rows in Parquet."""

    json: float
    parquet_file: float  # without rows
    parquet: float


_STEP = _Rows(400, 3_700, 70)
_OPERATION = _Rows(300, 3_200, 20)
_TRACE = _Rows(1_600, 16_000, 80)
_RANK_SAMPLE = _Rows(280, 3_400, 12)
_SAMPLE_LOG_FILE, _SAMPLE_LOG_ROW = 1_000, 40
_EMPTY_FILE = 1_300  # of operations
_OPERATIONS_PER_STEP = 1.3  # buckets of gradients; few models need a second one
# Sample identifiers in Parquet: the first ones fill a dictionary.
_FIRST_IDS, _FIRST_ID_BYTES, _ID_BYTES = 1_000, 6, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """Bytes on disk, without the traces of sidecars; these in bytes per second of training."""

    kept_bytes: float  # when the trials have ended well
    training_bytes: float  # more than that while a trial trains
    trace_kept_bytes_per_s: float = 0.0
    trace_training_bytes_per_s: float = 0.0

    def peak_bytes(self, training_s: float = 0.0) -> float:
        """Return the largest use of a run whose trials train for so long each."""
        return self.kept_bytes + self.training_bytes + self.trace_training_bytes_per_s * training_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Numbers of a training that a trial does not contain."""

    steps: int
    samples: int  # of the data set
    parameter_bytes: int  # 0 for a script, which writes no tensors of a known size
    optimizer_copies: int = 1  # tensors of the optimiser for each parameter


def trial_disk_use(trial: Trial, sizes: Sizes, *, keeps_tensors: bool = False) -> DiskUse:
    """Return the disk use of a trial. keeps_tensors: it keeps those for the comparison."""
    ranks, nodes = trial.placement.ranks, trial.placement.nodes
    rows, parquet = _rows_of_ranks(trial, sizes)
    tensors = 2.0 * sizes.parameter_bytes if trial.save_tensors else 0.0
    checkpoint = sizes.parameter_bytes * (1.0 + sizes.optimizer_copies)
    kept_checkpoints = 0.0
    if trial.checkpoint is not None and trial.checkpoint.keep:
        kept_checkpoints = KEPT * checkpoint
    kept = _TRIAL_BYTES + ranks * _RANK_BYTES + parquet + kept_checkpoints
    # the Parquet file of a kind of rows is complete before its JSON lines are removed
    training = rows
    if keeps_tensors:
        kept += tensors
    else:
        training += tensors
    if trial.checkpoint is not None:  # one more is being written
        training += (KEPT + 1) * checkpoint - kept_checkpoints
    if not trial.telemetry.enabled:
        return DiskUse(kept_bytes=kept, training_bytes=training)
    per_s = 1 / trial.telemetry.interval_s
    kept += nodes * (_HOST_BYTES + _TRACE.parquet_file + _RANK_SAMPLE.parquet_file)
    kept += ranks * _HOST_RANK_BYTES
    return DiskUse(
        kept_bytes=kept,
        training_bytes=training,
        trace_kept_bytes_per_s=per_s * (nodes * _TRACE.parquet + ranks * _RANK_SAMPLE.parquet),
        trace_training_bytes_per_s=per_s * (nodes * _TRACE.json + ranks * _RANK_SAMPLE.json),
    )


def run_disk_use(trials: Sequence[DiskUse], configurations: int) -> DiskUse:
    """Return the disk use of a run with these trials, one after the other."""
    return DiskUse(
        kept_bytes=_RUN_BYTES
        + configurations * _CONFIGURATION_BYTES
        + sum(t.kept_bytes for t in trials),
        training_bytes=max((t.training_bytes for t in trials), default=0.0),
        trace_kept_bytes_per_s=max((t.trace_kept_bytes_per_s for t in trials), default=0.0),
        trace_training_bytes_per_s=max((t.trace_training_bytes_per_s for t in trials), default=0.0),
    )


def _rows_of_ranks(trial: Trial, sizes: Sizes) -> tuple[float, float]:
    """Return the bytes of steps, operations and sample identifiers: as JSON, and in Parquet."""
    ranks, steps = trial.placement.ranks, sizes.steps
    operations = steps * _OPERATIONS_PER_STEP if ranks > 1 else 0.0
    # all ranks together log each sample once
    ids = steps * trial.training.global_batch / ranks
    digits = len(str(sizes.samples)) + 1
    json = _STEP.json * steps + _OPERATION.json * operations
    json += digits * ids + _SAMPLE_LOG_ROW * steps
    parquet = _STEP.parquet_file + _STEP.parquet * steps
    parquet += (
        _OPERATION.parquet_file + _OPERATION.parquet * operations if ranks > 1 else _EMPTY_FILE
    )
    parquet += _SAMPLE_LOG_FILE + _FIRST_ID_BYTES * min(ids, _FIRST_IDS)
    parquet += _ID_BYTES * max(0, ids - _FIRST_IDS)
    return ranks * json, ranks * parquet
