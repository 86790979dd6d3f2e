"""Single checks of a trial against its baseline; `equivalence` combines them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.analysis.equivalence import sample_log as sample_logs
from paceline.analysis.equivalence.own_checks import Level, RankFinding
from paceline.analysis.equivalence.ranks import Statement
from paceline.analysis.equivalence.shown import Shown
from paceline.analysis.equivalence.tolerances import Tolerance
from paceline.analysis.trial.reading import TrialRecord
from paceline.analysis.trial.steps import GlobalSteps
from paceline.plan.spec.models import Overrides
from paceline.plan.trials.sample_order import SampleOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of one check. `passed` is None if it could not be made; the reason explains why.

    value and tolerance: relative differences, if the check compares numbers.
    decisive: False if the result does not count.
    """

    name: str
    passed: bool | None
    reason: str
    value: float | None = None
    tolerance: float | None = None
    decisive: bool = True


def not_judged(check: Check, reason: str) -> Check:
    """Return the check as one that does not count, for the record."""
    return replace(
        check,
        passed=None,
        decisive=False,
        tolerance=None,
        reason=f"does not apply, because {reason}; {check.reason}",
    )


def not_decisive(check: Check, allowed: Tolerance) -> Check:
    """Return a check of values that follow from the final weights, after too many steps."""
    return replace(
        check,
        passed=None,
        decisive=False,
        reason=f"{check.reason}; not decisive: over {allowed.steps} steps, rounding alone may "
        "cause this difference",
    )


def sample_log_check(trial: TrialRecord, baseline: TrialRecord, order: SampleOrder | None) -> Check:
    ours = sample_logs.read_sample_log(trial.files)
    if not ours:
        return Check(name="sample_log", passed=None, reason="no rank wrote a sample log")
    faults = sample_logs.own_faults(ours)
    if order is not None:
        faults += sample_logs.differences(ours, sample_logs.planned_log(order), "the planned order")
    theirs = sample_logs.read_sample_log(baseline.files)
    if theirs:
        faults += sample_logs.differences(ours, theirs, "the baseline")
    elif order is None:
        return Check(name="sample_log", passed=None, reason="the baseline has no sample log")
    if faults:
        return Check(name="sample_log", passed=False, reason="; ".join(faults))
    samples = sum(len(ids) for _, ids in ours.values())
    return Check(
        name="sample_log",
        passed=True,
        reason=f"{len(ours)} steps, {samples} samples: equal sets in every step, none twice in an "
        "epoch",
    )


def training_check(trial: TrialRecord, baseline: TrialRecord) -> Check:
    ours, theirs = _training_values(trial), _training_values(baseline)
    faults = [
        f"{name} is {value!r}, the baseline has {theirs[name]!r}"
        for name, value in ours.items()
        if value != theirs[name]
    ]
    return Check(
        name="training",
        passed=not faults,
        reason="; ".join(faults) or "seed, batch, optimiser, data and all other values are equal",
    )


def _training_values(record: TrialRecord) -> dict[str, object]:
    """Return the values that must be equal, with the checksum of a user's file, not its path."""
    training = record.trial.training
    values = training.model_dump(exclude=set(Overrides.model_fields))  # compared on purpose
    if training.task_sha256 is not None:
        values["task"] = training.task.rpartition(":")[2]
    return values


def initial_weights_check(trial: TrialRecord, baseline: TrialRecord) -> Check:
    name = "initial_weights"
    ours, theirs = _initial_hashes(trial), _initial_hashes(baseline)
    if len(trial.ranks) > len(ours) or not ours or not theirs:
        return Check(name=name, passed=None, reason="a rank did not record its initial weights")
    different = sorted(r for r, value in ours.items() if value not in theirs.values())
    if different:
        listed = ", ".join(map(str, different))
        return Check(name=name, passed=False, reason=f"rank {listed} has other initial weights")
    return Check(name=name, passed=True, reason="equal SHA-256 on every rank")


_SHARDED = "they are sharded, or the ranks train different models"


def began_differently(record: TrialRecord) -> bool:
    """Return whether the ranks of a trial had different first weights."""
    return len(set(_initial_hashes(record).values())) > 1


def _initial_hashes(record: TrialRecord) -> dict[int, str]:
    return {
        r.rank: r.environment.initial_weights_sha256
        for r in record.ranks
        if r.environment is not None
    }


def loss_check(ours: GlobalSteps, theirs: GlobalSteps, allowed: Tolerance) -> Check:
    if not len(ours.loss) or not len(theirs.loss):
        return Check(name="first_loss", passed=None, reason="there is no step to compare")
    a, b = float(ours.loss[0]), float(theirs.loss[0])
    if math.isnan(a) or math.isnan(b):
        reason = "the script does not report its loss"
        return Check(name="first_loss", passed=None, reason=reason, decisive=False)
    value = abs(a - b) / abs(b) if b else (0.0 if a == b else math.inf)
    return Check(
        name="first_loss",
        passed=value <= allowed.loss,
        reason=f"loss of the first step {a:.6g}, the baseline's {b:.6g}",
        value=value,
        tolerance=allowed.loss,
    )


_SAMPLES = "samples"  # name of a check
_STATE_SAMPLES = "state them with paceline.step(samples=...) or samples_per_step"


def script_checks(
    trial: TrialRecord,
    baseline: TrialRecord,
    steps: tuple[GlobalSteps, GlobalSteps],
    checks: Sequence[Check],
) -> tuple[Check, ...]:
    """Return the checks of a user's script, undecided with one reason if they prove nothing.

    If gradient and weights agree with the baseline's, the trainings were equivalent. If they do
    not, that proves something only if the script started from the same weights and its samples are
    known: then they differ, or something else does.
    steps: of the trial and of the baseline. checks: of loss, gradient and weights.
    """
    reason = _why_not_comparable(trial, baseline)
    failed = [check for check in checks if check.decisive and check.passed is False]
    if reason is None and failed:
        samples = _samples_check(*steps)
        if samples is not None:
            return (samples, *checks)
        different = _why_different(*steps)
        if different is not None:
            reason = f"{different} ({failed[0].name}: {failed[0].reason})"
    if reason is None:
        return tuple(checks)
    undecided = Check(name="not checked", passed=None, reason=reason)
    return (undecided, *(not_judged(check, "it was not checked") for check in checks))


_FIRST_STEPS = "first_steps"  # name of a check
_OF_STATEMENT = {
    Statement.EQUAL: True,
    Statement.DATA_PARALLEL: True,
    Statement.MEAN: None,
    Statement.NOT_SHOWN: None,
    Statement.WRONG: False,
}


def checks_of_statement(shown: Shown, whole: Sequence[Check]) -> tuple[Shown, tuple[Check, ...]]:
    """Return what the first steps and the whole training of a script show together.

    whole: `script_checks`, and that of the replicas as the last one. A script that has rows of its
    own on each rank differs from the baseline and may be right, so a difference is no fault. Where
    all agree, they show more than ranks that do not add whole gradients.
    """
    *compared, replicas = whole
    failed = [each for each in compared if each.decisive and each.passed is False]
    agrees = all(each.passed for each in compared if each.decisive)
    if agrees and shown.is_to_be_compared:
        remarks = tuple(each for each in shown.findings if each.level == Level.REMARK)
        shown = replace(shown, statement=Statement.EQUAL, findings=remarks, steps=0)
    elif failed and failed[0].name != _SAMPLES and shown.statement == Statement.EQUAL:
        reason = f"later the training differs from that of one process: {failed[0].reason}"
        shown = shown.beside(RankFinding(level=Level.SUSPICION, kind="end", reason=reason))
    if replicas.decisive and replicas.passed is False:
        if shown.statement <= Statement.MEAN and not shown.has_roundings:
            shown = shown.beside(
                RankFinding(level=Level.FAULT, kind="drift", reason=replicas.reason)
            )
        replicas = not_judged(replicas, "it is among the findings of the first steps")
    if not agrees:
        compared = [not_judged(each, "the first steps decide") for each in compared]
    reason = "; ".join(shown.sentences)
    first = Check(name=_FIRST_STEPS, passed=_OF_STATEMENT[shown.statement], reason=reason)
    return shown, (first, *compared, replicas)


def _why_not_comparable(trial: TrialRecord, baseline: TrialRecord) -> str | None:
    """Return why the tensors say nothing, even if they agree."""
    for record, whose in ((trial, ""), (baseline, "the baseline: ")):
        if record.result is not None and record.result.not_compared is not None:
            return whose + record.result.not_compared
        if began_differently(record):
            return f"{whose}its ranks began with different weights: {_SHARDED}"
    if initial_weights_check(trial, baseline).passed is False:
        return (
            "it started from other weights than the baseline; fix the seed in the script "
            "(torch.manual_seed)"
        )
    return None


def _samples_check(ours: GlobalSteps, theirs: GlobalSteps) -> Check | None:
    """Return the failed check of a script whose steps have another number of samples."""
    if not (ours.samples_known and theirs.samples_known):
        return None
    common = min(len(ours.step), len(theirs.step))
    differs = np.flatnonzero(ours.samples[:common] != theirs.samples[:common])
    if not len(differs):
        return None
    place = int(differs[0])
    reason = (
        f"step {place} had {ours.samples[place]} samples, the baseline's {theirs.samples[place]}; "
        "divide a fixed global batch by WORLD_SIZE in the script"
    )
    return Check(name=_SAMPLES, passed=False, reason=reason)


def _why_different(ours: GlobalSteps, theirs: GlobalSteps) -> str | None:
    """Return why the tensors may differ although nothing is wrong; None if they may not."""
    if not (ours.samples_known and theirs.samples_known):
        return f"the samples of a step are not known, so the batches may differ; {_STATE_SAMPLES}"
    if len(ours.step) != len(theirs.step):
        return f"it took {len(ours.step)} steps, the baseline {len(theirs.step)}"
    return None
