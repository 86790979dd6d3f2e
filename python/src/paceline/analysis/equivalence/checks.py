"""Single checks of a trial against its baseline; `equivalence` combines them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.analysis.equivalence import sample_log as sample_logs
from paceline.analysis.equivalence.tensors import (
    TensorDifference,
    tensor_differences,
    tensor_names,
)
from paceline.analysis.equivalence.tolerances import UNIT_ROUNDOFF_FP32, Tolerance
from paceline.errors import NotComparable
from paceline.records.comparison_points import (
    EARLY,
    EARLY_STEPS,
    FINAL,
    REPLAYED_STEPS,
    replay_point,
    replayed_after,
)
from paceline.records.files import document
from paceline.records.rows import RankWeights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paceline.analysis.trial.reading import TrialRecord
    from paceline.analysis.trial.steps import GlobalSteps
    from paceline.plan.sample_order import SampleOrder

FINAL_WEIGHTS, REPLICAS, REPLAY = "final_weights", "replicas", "replay_"  # names of checks
_LEAST_SHARE = 2.0**-7
_COMPARED_ON_PURPOSE = {
    "precision",
    "memory_format",
    "batch_norm",
    "activation_checkpointing",
}  # these may differ between trainings


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
    return dataclasses.replace(
        check,
        passed=None,
        decisive=False,
        tolerance=None,
        reason=f"does not apply, because {reason}; {check.reason}",
    )


def not_decisive(check: Check, allowed: Tolerance) -> Check:
    """Return a check of values that follow from the final weights, after too many steps."""
    return dataclasses.replace(
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
    values = training.model_dump(exclude=_COMPARED_ON_PURPOSE)
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


def gradient_check(trial: TrialRecord, baseline: TrialRecord, allowed: Tolerance) -> Check:
    name = "first_gradient"
    if _same_bits(trial, baseline):
        return Check(
            name=name,
            passed=True,
            reason="not needed: the final weights are equal bit for bit",
            value=0.0,
            tolerance=allowed.gradient,
        )
    ours, theirs = trial.files.gradient, baseline.files.gradient
    if not (ours.exists() and theirs.exists()):
        return Check(name=name, passed=None, reason=_no_tensors("gradient", ours))
    return _compared_gradients(
        name, ours, theirs, allowed.gradient, UNIT_ROUNDOFF_FP32 / allowed.gradient
    )


def _compared_gradients(name: str, ours: Path, theirs: Path, limit: float, least: float) -> Check:
    """Compare two gradients.

    The gradient of a tensor may be nearly zero, that is, noise. Then it is compared with a share
    `least` of the whole gradient.
    """
    try:
        differences = tensor_differences(ours, theirs)
    except NotComparable as error:
        return Check(name=name, passed=False, reason=str(error))
    floor = least * math.hypot(*(d.baseline_l2 for d in differences))
    scales = {d.name: d.baseline_l2 + floor for d in differences}
    return _worst(name, differences, scales, limit, "times its gradient's norm")


def weights_check(
    trial: TrialRecord, baseline: TrialRecord, allowed: Tolerance
) -> tuple[Check, float | None]:
    """Compare the final weights; return the check and the largest absolute difference."""
    if _same_bits(trial, baseline):
        reason = "equal bit for bit (SHA-256)"
        check = Check(
            name=FINAL_WEIGHTS, passed=True, reason=reason, value=0.0, tolerance=allowed.weights
        )
        return check, 0.0
    check, largest = _point_check(
        FINAL_WEIGHTS, FINAL, allowed.steps, trial, baseline, allowed.weights
    )
    if not allowed.weights_judged and largest is not None and math.isfinite(largest):
        check = not_decisive(check, allowed)
    return check, largest


def early_weights_check(
    trial: TrialRecord, baseline: TrialRecord, allowed: Tolerance
) -> Check | None:
    """Compare the weights after `EARLY_STEPS` steps; None for a shorter training."""
    if allowed.steps <= EARLY_STEPS:
        return None
    name = f"weights_{EARLY}"
    if _same_bits(trial, baseline):
        reason = "not needed: the final weights are equal bit for bit"
        return Check(name=name, passed=True, reason=reason, value=0.0)
    limit = allowed.early_weights
    check, _ = _point_check(name, EARLY, EARLY_STEPS, trial, baseline, limit)
    if check.passed is False and not allowed.judges(EARLY):
        return not_decisive(check, allowed)
    # records of older versions have none
    return dataclasses.replace(check, decisive=check.passed is not None)


def replay_checks(trial: TrialRecord, baseline: TrialRecord, allowed: Tolerance) -> list[Check]:
    """Compare the weights after the replayed steps; an impossible comparison does not count."""
    found = []
    for first in replayed_after(allowed.steps):
        point = replay_point(first)
        name = f"{REPLAY}{first}"
        replayed = None if trial.result is None else trial.result.replayed
        if replayed is not None and point in replayed.faults:
            check = Check(name=name, passed=False, reason=replayed.faults[point])
        elif replayed is not None and point in replayed.missing:
            check = Check(name=name, passed=None, reason=replayed.missing[point])
        else:
            limit = allowed.of_replay(point)
            check, _ = _point_check(
                name, point, REPLAYED_STEPS, trial, baseline, limit, least=_LEAST_SHARE
            )
            files = trial.files.gradient_at(point), baseline.files.gradient_at(point)
            if check.passed and all(file.exists() for file in files):
                gradient = _compared_gradients(name, *files, limit, _LEAST_SHARE)
                check = max(check, gradient, key=lambda c: (not c.passed, c.value or 0.0))
        found.append(dataclasses.replace(check, decisive=check.passed is not None))
    return found


def _point_check(
    name: str,
    point: str,
    steps: int,
    trial: TrialRecord,
    baseline: TrialRecord,
    limit: float,
    *,
    least: float = 0.0,
) -> tuple[Check, float | None]:
    """Compare the weights at a point, `steps` steps after equal ones.

    limit: for each tensor, as a share of the distance that training moved it. least: share of the
    distance of all trained parameters that is added to it, so that rounding of a tensor which
    hardly moves is none. Return the check and the largest absolute difference.
    """
    ours, theirs = trial.files.weights_at(point), baseline.files.weights_at(point)
    if baseline.result is None or not (ours.exists() and theirs.exists()):
        return Check(name=name, passed=None, reason=_no_tensors("weights", ours)), None
    try:
        differences = tensor_differences(ours, theirs)
    except NotComparable as error:
        return Check(name=name, passed=False, reason=str(error)), None
    largest = max((d.max_abs for d in differences), default=0.0)
    moved_l2 = {FINAL: baseline.result.update_l2, **baseline.result.replayed.moved_l2}
    moved = moved_l2.get(point, {})
    unknown = sorted(d.name for d in differences if d.name not in moved)
    if unknown:
        reason = f"the baseline did not record its update of {', '.join(unknown[:3])}"
        return Check(name=name, passed=None, reason=reason), largest
    trained = tensor_names(baseline.files.gradient) & moved.keys() if least else set()
    floor = least * math.hypot(*(moved[tensor] for tensor in trained))
    # The distance that training moved each tensor is at least its rounding in these steps.
    rounding = UNIT_ROUNDOFF_FP32 * steps / limit if steps else 0
    scales = {d.name: moved[d.name] + rounding * d.baseline_l2 + floor for d in differences}
    check = _worst(name, differences, scales, limit, "times the distance that training moved it")
    return check, largest


def every_step_check(trial: TrialRecord, baseline: TrialRecord) -> Check:
    """Check that each step changed the weights, if it changed the baseline's."""
    name = "every_step"
    ours, theirs = _unchanged_after(trial), _unchanged_after(baseline)
    if ours is None or theirs is None:
        reason = "no rank recorded in which steps its weights changed"
        return Check(name=name, passed=None, reason=reason, decisive=False)
    lost = sorted(step - 1 for step in ours - theirs)
    if lost:
        reason = f"the weights did not change in step {sample_logs.some(lost)}: an update was lost"
        return Check(name=name, passed=False, reason=reason)
    return Check(name=name, passed=True, reason="every step changed the weights")


def _unchanged_after(record: TrialRecord) -> set[int] | None:
    """Return the steps after which no rank's weights had changed; None if that is not known.

    A rank may own parts that a step does not use, such as rows of an embedding.
    """
    known = [w.unchanged_after for w in _rank_weights(record).values() if w is not None]
    found = [set(steps) for steps in known if steps is not None]
    return set.intersection(*found) if found else None


def _rank_weights(record: TrialRecord) -> dict[int, RankWeights | None]:
    return {r.rank: document(record.files.rank(r.rank).weights, RankWeights) for r in record.ranks}


def replicas_check(trial: TrialRecord) -> Check:
    """Check that all replicas of a trial ended with equal weights and buffers, bit for bit."""
    name = REPLICAS
    found = _rank_weights(trial)
    silent = sorted(rank for rank, weights in found.items() if weights is None)
    if silent or not found:
        listed = ", ".join(map(str, silent))
        reason = f"rank {listed} did not record checksums of its final weights"
        return Check(name=name, passed=None, reason=reason, decisive=False)
    known = [weights for weights in found.values() if weights is not None]
    local = {buffer for weights in known for buffer in weights.local}
    places: dict[str, dict[str, str]] = {}  # by tensor and checksum: the first place
    for rank, weights in zip(found, known, strict=True):
        for number, replica in enumerate(weights.replicas):
            place = f"replica {number - 1} of rank {rank}" if number else f"rank {rank}"
            for tensor in replica.keys() - local:
                places.setdefault(tensor, {}).setdefault(replica[tensor], place)
    different = sorted(tensor for tensor, sums in places.items() if len(sums) > 1)
    if different:
        first, other, *_ = places[different[0]].values()
        more = f" and {len(different) - 1} more tensors" if len(different) > 1 else ""
        reason = f"{other} ended with another {different[0]}{more} than {first}"
        return Check(name=name, passed=False, reason=reason)
    count = sum(max(1, len(weights.replicas) - 1) for weights in known)
    reason = f"{len(places)} tensors of {count} replicas are equal, bit for bit"
    if local:
        reason += f"; not compared, because batch_norm is per-replica: {', '.join(sorted(local))}"
    return Check(name=name, passed=True, reason=reason)


def _worst(
    name: str,
    differences: list[TensorDifference],
    scales: Mapping[str, float],
    allowed: float,
    unit: str,
) -> Check:
    """Check every tensor; report the one with the largest relative difference."""
    relative = {d.name: _ratio(d.difference_l2, scales[d.name]) for d in differences}
    if not relative:
        return Check(name=name, passed=None, reason="the files contain no tensors")
    worst = max(relative, key=lambda tensor: _nan_as_infinite(relative[tensor]))
    value = relative[worst]
    reason = (
        f"{worst} differs most, by {value:.2g} {unit}"
        if math.isfinite(value)
        else f"{worst} contains a value that is not finite, or differs where the baseline is zero"
    )
    return Check(name=name, passed=value <= allowed, reason=reason, value=value, tolerance=allowed)


def _ratio(difference: float, scale: float) -> float:
    if scale == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / scale


def _nan_as_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _same_bits(trial: TrialRecord, baseline: TrialRecord) -> bool:
    ours, theirs = trial.result, baseline.result
    return ours is not None and theirs is not None and ours.weights_sha256 == theirs.weights_sha256


def _no_tensors(what: str, ours: Path) -> str:
    side = "the baseline's" if ours.exists() else "its own"
    return f"{side} {what} do not exist, so they cannot be compared"


_STATE_SAMPLES = "state them with paceline.step(samples=...) or samples_per_step"


def script_checks(
    trial: TrialRecord,
    baseline: TrialRecord,
    steps: tuple[GlobalSteps, GlobalSteps],
    checks: Sequence[Check],
) -> tuple[Check, ...]:
    """Return the checks of a user's script, undecided with one reason if they prove nothing.

    Paceline does not know which samples a script trains on. If gradient and weights agree with the
    baseline's, the trainings were equivalent. If they do not, that proves something only if the
    script started from the same weights and took the same number of samples in each step.
    steps: of the trial and of the baseline. checks: of loss, gradient and weights.
    """
    reason = _why_not_comparable(trial, baseline)
    if reason is None and any(check.decisive and check.passed is False for check in checks):
        different = _why_different(*steps)
        if different is not None:
            worst = next(check for check in checks if check.passed is False)
            reason = f"{different} ({worst.name}: {worst.reason})"
    if reason is None:
        return tuple(checks)
    undecided = Check(name="not checked", passed=None, reason=reason)
    return (undecided, *(not_judged(check, "it was not checked") for check in checks))


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


def _why_different(ours: GlobalSteps, theirs: GlobalSteps) -> str | None:
    """Return why the tensors may differ although nothing is wrong; None if they may not."""
    if not (ours.samples_known and theirs.samples_known):
        return f"the samples of a step are not known, so the batches may differ; {_STATE_SAMPLES}"
    if len(ours.step) != len(theirs.step):
        return f"it took {len(ours.step)} steps, the baseline {len(theirs.step)}"
    if not np.array_equal(ours.samples, theirs.samples):
        place = int(np.flatnonzero(ours.samples != theirs.samples)[0])
        return (
            f"step {place} had {ours.samples[place]} samples, the baseline's "
            f"{theirs.samples[place]}; divide a fixed global batch by WORLD_SIZE in the script"
        )
    return None
