"""Speeds of the finished trials of a run, and whether two baselines trained the same.

For comparisons of whole runs, and for the decision whether another repeat is needed. Reading a run
this way takes a small part of the time of `compare_run`. A reference file keeps the speeds of a run
whose directory is gone.

Within a run every configuration is compared with its baseline by gradients and weights, which are
deleted afterwards. What is left of a baseline are the values of its training, the checksum of its
initial weights, and the losses of its steps. Losses follow from the weights, so a changed update
shows in the losses of the next steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.analysis.compare.compute_row import combined_equivalence, repeats_itself
from paceline.analysis.equivalence.check import (
    Equivalence,
    equivalence_baseline,
    equivalence_of,
    measured_rounding,
    plainness,
)
from paceline.analysis.equivalence.tolerances import tolerance

# The types of fields are needed at run time, because references are read from JSON: of RepeatRate,
# RunRates and Training.
from paceline.analysis.statistics.rates import RepeatRate, RunRates
from paceline.analysis.trial.evaluation import read_evaluations, target_time
from paceline.analysis.trial.load import recorded_load
from paceline.analysis.trial.reading import (
    TrialRecord,
    by_workload,
    load_manifest,
    load_run,
    with_sources,
)
from paceline.analysis.trial.steps import GlobalSteps, global_steps, samples_rate
from paceline.base.errors import DataError
from paceline.measure.records.files import document, jsonable, write_json
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.rows import SCHEMA
from paceline.plan.trials.trial import Training, Trial

_STEPS = 16  # compared at most: over more steps, rounding alone moves losses apart
# Places, the length of the training, and what does not change a step. The losses decide about the
# code of a task or script, and about the data.
_APART = {
    "dataset", "cache", "task", "task_sha256", "script", "epochs", "max_steps", "warmup_steps",
    "reading", "evaluation", "items",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineTraining:
    """Facts about the training of one repeat of a baseline."""

    training: Training
    initial_weights: tuple[str, ...]  # SHA-256 of its ranks; () if unknown
    losses: tuple[float | None, ...]  # of the first steps
    rounding: Mapping[str, float]  # changes that the baseline has measured, by point


def baseline_training(record: TrialRecord, steps: GlobalSteps) -> BaselineTraining:
    """Collect what a comparison with another run needs."""
    environments = [rank.environment for rank in record.ranks if rank.environment is not None]
    losses = steps.loss[:_STEPS].tolist()
    return BaselineTraining(
        training=record.trial.training,
        initial_weights=tuple(sorted({each.initial_weights_sha256 for each in environments})),
        losses=tuple(None if math.isnan(loss) else loss for loss in losses),
        rounding=measured_rounding(record),
    )


def why_other_training(before: BaselineTraining, after: BaselineTraining) -> str | None:
    """Return how the second baseline trained differently; None if no difference was found."""
    theirs, ours = (each.training.model_dump(exclude=_APART) for each in (before, after))
    changed = [
        f"{name} is {value}, not {theirs.get(name)}"
        for name, value in ours.items()
        if value != theirs.get(name)
    ]
    if changed:
        return "; ".join(changed)
    if before.initial_weights and after.initial_weights != before.initial_weights:
        return "the baseline begins with other weights"
    training = before.training
    allowed = tolerance(
        after.training.arithmetic,
        training.arithmetic,
        _STEPS,
        rounding=before.rounding,
        global_batch=training.global_batch,
    )
    for step, (old, new) in enumerate(zip(before.losses, after.losses, strict=False)):
        if old is None or new is None:
            continue
        # Each step adds the difference of its gradient.
        limit = allowed.loss + step * allowed.gradient
        difference = abs(new - old) / max(abs(old), abs(new), 1e-30)
        if difference > limit:
            return (
                f"the loss of the baseline in step {step} is {new:.6g}, not {old:.6g}: a relative "
                f"difference of {difference:.2g}, allowed are {limit:.2g}"
            )
    return None


_MOST_REFERENCE_BYTES = 2**24
_LARGEST_LOG = 50.0  # of a speed, either way
_KEPT_OF_MANIFEST = (
    "schema", "name", "created_unix_s", "host", "versions", "packages", "git", "spec_toml",
    "sources",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpeeds:
    """Samples per second of the finished trials, by configuration and repeat."""

    manifest: Mapping[str, Any]
    rates: dict[str, dict[int, RepeatRate]] = field(default_factory=dict)
    trials: dict[str, Trial] = field(default_factory=dict)  # one repeat of each configuration
    # None: a repeat was not checked, or is lossy on purpose
    equivalent: dict[str, bool | None] = field(default_factory=dict)
    differences: dict[str, str] = field(default_factory=dict)  # of those that are not equivalent
    unfinished: tuple[str, ...] = ()  # configurations without a finished repeat
    # by workload; of the first repeat, if it finished and could be repeated with equal weights
    baselines: dict[str, BaselineTraining] = field(default_factory=dict)
    schema: int = SCHEMA

    def of_workload(self, workload: str) -> RunRates:
        """Return the speeds of one workload's configurations."""
        return RunRates(
            {n: r for n, r in self.rates.items() if self.trials[n].training.workload == workload}
        )

    @property
    def loaded(self) -> tuple[int, int]:
        """The number of trials beside other work, and of all."""
        trials = [rate for repeats in self.rates.values() for rate in repeats.values()]
        return sum(rate.is_loaded for rate in trials), len(trials)

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(trial.training.workload for trial in self.trials.values()))


def trial_speed(record: TrialRecord) -> RepeatRate | None:
    """Return the samples per second of the steady steps of a trial; None if it has none."""
    return _beside_load(record, samples_rate(record, global_steps(record)))


def target_speed(record: TrialRecord) -> RepeatRate | None:
    """Return the rate at which a trial reached its target; None if it missed it."""
    steps = global_steps(record)
    found = target_time(record, steps, read_evaluations(record, steps))
    return _beside_load(record, found.rate) if found is not None and found.reached else None


def _beside_load(record: TrialRecord, rate: RepeatRate | None) -> RepeatRate | None:
    """Return the rate with the fact whether other processes used the machine."""
    if rate is None:
        return None
    load = recorded_load(record)
    return replace(rate, is_loaded=load is not None and load.is_load)


def read_speeds(run: RunFiles) -> RunSpeeds:
    """Read the speeds of a run. Raises DataError if a file is damaged."""
    records = load_run(run)
    finished = [record for record in records if record.finished]
    found = RunSpeeds(manifest=with_sources(load_manifest(run), finished))
    for workload, own in by_workload(finished).items():
        _add_workload(found, workload, own)
    every = dict.fromkeys(record.trial.configuration for record in records)
    return replace(found, unfinished=tuple(name for name in every if name not in found.rates))


def write_reference(path: Path, speeds: RunSpeeds) -> None:
    """Write what a later run can be compared with."""
    manifest = {key: speeds.manifest[key] for key in _KEPT_OF_MANIFEST if key in speeds.manifest}
    write_json(path, jsonable(replace(speeds, manifest=manifest)))


def read_reference(path: Path) -> RunSpeeds:
    """Read a file of `write_reference`. Raises DataError if it is something else."""
    size = path.stat().st_size
    if size > _MOST_REFERENCE_BYTES:
        raise DataError(
            f"{path}: expected a reference of at most {_MOST_REFERENCE_BYTES} bytes, got {size}; "
            "`paceline compare RUN_DIR --save-reference FILE` writes one"
        )
    found = document(path, RunSpeeds)
    if found is None or found.schema != SCHEMA:
        raise DataError(f"{path}: expected a reference of schema {SCHEMA}")
    logs = [rate.log_rate for rates in found.rates.values() for rate in rates.values()]
    if not all(math.isfinite(log) and abs(log) < _LARGEST_LOG for log in logs):
        raise DataError(f"{path}: expected logarithms of speeds, found other numbers in `rates`")
    if not found.rates.keys() <= found.trials.keys() & found.equivalent.keys():
        raise DataError(f"{path}: expected a trial for each configuration of `rates`")
    return found


def _add_workload(found: RunSpeeds, workload: str, finished: Sequence[TrialRecord]) -> None:
    baselines = [record for record in finished if record.trial.is_baseline]
    is_repeatable = repeats_itself(baselines)
    checks: dict[str, list[Equivalence | None]] = defaultdict(list)
    for record in finished:
        steps = global_steps(record)
        speed = _beside_load(record, samples_rate(record, steps))
        if speed is None:
            continue
        name = record.trial.configuration
        found.rates.setdefault(name, {})[record.trial.repeat] = speed
        found.trials.setdefault(name, record.trial)
        baseline = equivalence_baseline(record, baselines)
        checks[name].append(None if baseline is None else equivalence_of(record.files, baseline))
        if is_repeatable and record is min(baselines, key=plainness, default=None):
            found.baselines[workload] = baseline_training(record, steps)
    for name, each in checks.items():
        verdicts = [None if check is None else check.equivalent for check in each]
        is_verified = any(check is not None and check.shown is not None for check in each)
        found.equivalent[name] = combined_equivalence(verdicts, is_repeatable or is_verified)
        if found.equivalent[name] is False:
            faults = (fault for check in each if check is not None for fault in check.faults)
            found.differences[name] = next(faults)
