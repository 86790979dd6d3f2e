"""An estimate of the disk use of a run, before it starts.

Rows are JSON lines while their trial trains, and smaller Parquet files afterwards. The sizes of
rows are rounded means of real runs. The traces of sidecars grow with the time of the training,
which is not known before, so they are given as a rate.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import PacelineWarning
from paceline.measure.records.checkpoints import KEPT
from paceline.measure.records.comparison_points import kept_after, replayed_after
from paceline.plan.trials.trial import Training, Trial, task_facts
from paceline.runner.trials.planning import Planned, known_samples, planned_steps

_RUN_BYTES = 2_200_000  # the report holds the library that draws its figures
_TRIAL_BYTES = 15_000
_RANK_BYTES = 12_000
_HOST_BYTES = 25_000
# Of a step of a rank, with its operations; of a sample identifier; of a sample of the sidecar.
_STEP_JSON, _STEP_PARQUET = 830, 100
_ID_JSON, _ID_PARQUET = 6, 3
_TRACE_JSON, _TRACE_PARQUET = 1_600, 80
_RANK_TRACE_JSON, _RANK_TRACE_PARQUET = 280, 12
_COPIES_OF_SGD, _COPIES_OF_OTHERS = 1, 2  # Adam and its relatives have two

Parameters = tuple[int, int]  # bytes of all, and tensors of the optimiser for each


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


def total_disk_use(trials: Sequence[DiskUse]) -> DiskUse:
    """Return the disk use of a run, whose trials train one after the other."""
    return DiskUse(
        kept_bytes=_RUN_BYTES + sum(use.kept_bytes for use in trials),
        training_bytes=max((use.training_bytes for use in trials), default=0.0),
        trace_kept_bytes_per_s=max((use.trace_kept_bytes_per_s for use in trials), default=0.0),
        trace_training_bytes_per_s=max(
            (use.trace_training_bytes_per_s for use in trials), default=0.0
        ),
    )


def warn_of_small_disk(use: DiskUse, trial_s: float, folder: Path) -> None:
    """Warn if the disk of a folder has less free than the run may need.

    trial_s: the longest that a trial may take.
    """
    free, needed = shutil.disk_usage(folder).free, use.peak_bytes(trial_s)
    if needed > free:
        message = (
            f"{folder}: the run may need {needed / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free; "
            "free some, choose another disk with --out, or write fewer checkpoints and tensors"
        )
        warnings.warn(message, PacelineWarning, stacklevel=2)


def trial_disk_use(
    trial: Trial, steps: int, parameters: Parameters, *, keeps_tensors: bool = False
) -> DiskUse:
    """Return the disk use of a trial. keeps_tensors: it keeps those for the comparison."""
    ranks, nodes = trial.placement.ranks, trial.placement.nodes
    ids = steps * trial.training.global_batch  # all ranks together log each sample once
    checkpoint = parameters[0] * (1.0 + parameters[1])
    tensors = 2.0 * parameters[0] if trial.save_tensors else 0.0  # gradient and final weights
    if trial.is_replayed:
        tensors += parameters[0] * len(kept_after(steps))
        if keeps_tensors and trial.is_baseline:
            states = checkpoint * len(replayed_after(steps))  # to replay from
            tensors += parameters[0] + states
    kept: float = _TRIAL_BYTES + ranks * (_RANK_BYTES + steps * _STEP_PARQUET) + ids * _ID_PARQUET
    # the Parquet file of a kind of rows is complete before its JSON lines are removed
    training: float = ranks * steps * _STEP_JSON + ids * _ID_JSON
    if keeps_tensors:
        kept += tensors
    else:
        training += tensors
    if trial.checkpoint is not None:  # one more is being written
        kept_checkpoints = KEPT * checkpoint if trial.checkpoint.keep else 0.0
        kept += kept_checkpoints
        training += (KEPT + 1) * checkpoint - kept_checkpoints
    if not trial.telemetry.enabled:
        return DiskUse(kept_bytes=kept, training_bytes=training)
    per_s = 1 / trial.telemetry.interval_s
    return DiskUse(
        kept_bytes=kept + nodes * _HOST_BYTES,
        training_bytes=training,
        trace_kept_bytes_per_s=per_s * (nodes * _TRACE_PARQUET + ranks * _RANK_TRACE_PARQUET),
        trace_training_bytes_per_s=per_s * (nodes * _TRACE_JSON + ranks * _RANK_TRACE_JSON),
    )


def _parameters(training: Training) -> Parameters:
    if training.script is not None:  # it writes no tensors of a known size
        return 0, 0
    facts = task_facts(training)
    copies = _COPIES_OF_SGD if facts.optimizer == "SGD" else _COPIES_OF_OTHERS
    return facts.parameter_bytes, copies


def disk_uses(planned: Planned) -> list[DiskUse]:
    """Return the disk use of each trial; asks for facts of the models, 1 to 2 s for each."""
    known: dict[str, tuple[int, Parameters]] = {}
    with_baseline: set[tuple[str, int, str]] = set()
    found = []
    for trial in planned.trials:
        training = trial.training
        if training.workload not in known:
            steps = planned_steps(training, known_samples(planned, training)) or 0
            known[training.workload] = steps, _parameters(training)
        key = (training.workload, training.seed, training.precision)
        is_first_baseline = trial.is_baseline and key not in with_baseline
        if is_first_baseline:
            with_baseline.add(key)
        keeps = planned.experiment.keep_tensors or is_first_baseline
        found.append(trial_disk_use(trial, *known[training.workload], keeps_tensors=keeps))
    return found
