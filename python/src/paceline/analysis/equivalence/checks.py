"""Single checks of a trial against its baseline; `equivalence` combines them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl
from numpy.typing import NDArray

from paceline.analysis.trial.reading import TrialRecord
from paceline.analysis.trial.steps import GlobalSteps
from paceline.base.errors import DataError
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.phases import (
    EARLY_STEPS,
    FINAL,
    GRADIENT,
    LONG_STEPS,
    ROUNDOFF,
)
from paceline.measure.records.rows import SampleLogRow
from paceline.measure.records.tables import read_table
from paceline.plan.spec.models import Overrides
from paceline.plan.trials.sample_order import SampleOrder

# --- allowed differences between two runs of the same training, and their derivation -------------
#
# Distributing a batch changes the order in which its gradients are added, nothing else. Adding m
# numbers in another order changes the sum by at most about m*u relative to the sum of magnitudes,
# and by about sqrt(m)*u where roundings are independent (Higham, Accuracy and Stability of
# Numerical Algorithms, 2nd ed., chapter 4; Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019). With
#
# - u = 2^-24, the unit roundoff of fp32 (IEEE 754);
# - m = 2^18: the first convolution of AlexNet at batch 64 adds 64 x 55 x 55 = 2^17.6 terms a
#   weight, so sqrt(m) = 2^9;
# - 16 = 2^4 layers with weights (VGG16), through which the differences pass and add up,
#
# the gradient of the first step may differ by 2^-24 * 2^9 * 2^4 = 2^-11 of its norm. The smallest
# mistake that matters is one sample too many or too few in a batch of some hundred, about 2^-7; a
# sum in place of a mean over two ranks is 1.
#
# Rounding may do more, above all where layers normalise: a unit of ReLU that is nearly zero
# switches, and a single one may move the gradient of a small batch by 1e-3 to 2e-2 (measured on
# four networks, docs/results/raw/rounding.json: in a quarter of the batches, for some networks in
# all). So the baseline measures the change of its own first gradient when the inputs change by 16
# u. Four times this change is allowed, at most half of one sample's share of the batch, or 2^-7 if
# that is more: one sample too many or too few is still found.
#
# Under bf16 autocast products are added in fp32 and results rounded, by at most u = 2^-8 and half
# of that on average; sixteen layers forward and backward give 2^5 roundings: 2^-4. Against an fp32
# baseline, units of ReLU and max-pooling also decide otherwise (measured: 0.21 on a small AlexNet),
# hence 2^-2. Under fp16 and in products of float32 that are rounded to TF32 ("high"), u = 2^-11;
# both limits are four times smaller there. Products of float32 with "medium" round to bf16. A
# baseline of the same arithmetic measures its first gradient there, too.
#
# Over n steps the differences grow: momentum sums them twice, as n^2, and later they grow
# exponentially, because the loss is not convex (measured on a small AlexNet, learning rate 0.01,
# relative to the update: 3e-5 after 1 step, 8e-3 after 24, 0.13 after 48). In deep nets units of
# ReLU and max-pooling soon decide otherwise: with VGG16 at 224x224 the framework's own threads
# alone, whose first gradient differs by 1e-5, give 0.025 after 7 steps. That is n^2 * 2^-11 and
# leaves no room, so there is a factor of 4. Weights may differ by 4 n^2 times the gradient's
# tolerance, at most a quarter of the distance that training moved them (fp32; half of it for bf16),
# which is what mistakes still exceed: a sum for a mean over k ranks differs by k - 1, ranks that do
# not exchange gradients by about sqrt(1 - 1/k). After `LONG_STEPS` steps rounding alone may have
# grown that far, and the weights prove nothing; then steps are replayed from states of the
# baseline.
#
# A unit that switches in one of the steps may do more (measured: in one of six trainings of a small
# AlexNet 0.03 after 16 steps, 0.15 after 40 and 0.47 after 64, against at most 6e-4 in the others).
# So the baseline also repeats the training, up to 64 steps, with inputs that change by 2^-20 (fp32
# only). Where four times the change of its own weights is above the limit, its weights prove
# nothing.
#
# Two replayed steps have little room for growth, but their gradients may be nearly zero, late in a
# training, and so more sensitive than the first one. After them, a tensor may differ by 2^-4 of the
# distance, or by four times its measured change. A tensor that hardly moves is compared with 2^-7
# of the distance of all. A learning rate that is wrong by a tenth is still found.

_LOW_ROUNDINGS, _SWITCHES = 2.0**5, 4.0  # factors, see above
ROOM = 4.0
LEAST_MISTAKE = 2.0**-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Relative tolerances; `loss` and `gradient` are of step 1, `weights` after all steps.

    rounding: changes that the baseline has measured, by point.
    """

    arithmetic: str  # of both, as in "fp32" or "bf16 against fp32"
    steps: int
    loss: float
    gradient: float
    rounding: Mapping[str, float] = field(default_factory=dict)

    @property
    def weights_judged(self) -> bool:
        """Return whether the final weights can decide."""
        return self.steps <= LONG_STEPS and self.judges(FINAL)

    @property
    def weights(self) -> float:
        return self.of_weights(self.steps)

    @property
    def early_weights(self) -> float:
        return self.of_weights(EARLY_STEPS)

    def of_weights(self, steps: int) -> float:
        """Return the limit for one tensor after some steps from the first weights."""
        return min(ROOM * self.gradient * steps**2, self._weights_limit)

    def of_replay(self, point: str) -> float:
        """Return the limit for one tensor after replayed steps."""
        measured = ROOM * self.rounding.get(point, 0.0)
        derived = 2.0**-4 if self.arithmetic == "fp32" else self._weights_limit
        return min(max(derived, measured), self._weights_limit)

    @property
    def _weights_limit(self) -> float:
        return 0.25 if self.arithmetic == "fp32" else 0.5

    def judges(self, point: str) -> bool:
        """Return whether rounding alone stays below the largest limit at a point."""
        return ROOM * self.rounding.get(point, 0.0) <= self._weights_limit


def tolerance(
    ours: str,
    baseline: str,
    steps: int,
    *,
    rounding: Mapping[str, float] | None = None,
    global_batch: int = 1,
) -> Tolerance:
    """Return the tolerance for a trial after `steps` steps.

    ours, baseline: their arithmetic, see `Training.arithmetic`. rounding: changes that the baseline
    has measured, by point. global_batch: samples of a step.
    """
    arithmetic = ours if ours == baseline else f"{ours} against {baseline}"
    derived = gradient = _of_gradient(ours, baseline)
    measured = dict(rounding or {}) if ours == baseline else {}
    if GRADIENT in measured:
        most = max(LEAST_MISTAKE, 1 / (2 * global_batch))
        gradient = max(derived, min(ROOM * measured[GRADIENT], most))
    return Tolerance(
        arithmetic=arithmetic,
        steps=steps,
        # the loss is the end of the forward half of the same computation
        loss=min(derived, _of_gradient("bf16", "bf16")),
        gradient=gradient,
        rounding=measured,
    )


def _of_gradient(ours: str, baseline: str) -> float:
    """Return the derived limit for the first gradient."""
    if ours == baseline == "fp32":
        return 2.0**-11
    rounded = _LOW_ROUNDINGS * max(ROUNDOFF[ours], ROUNDOFF[baseline])
    return rounded if ours == baseline else _SWITCHES * rounded


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
    ours = read_sample_log(trial.files)
    if not ours:
        return Check(name="sample_log", passed=None, reason="no rank wrote a sample log")
    faults = sample_log_faults(ours)
    if order is not None:
        faults += sample_log_differences(ours, planned_log(order), "the planned order")
    theirs = read_sample_log(baseline.files)
    if theirs:
        faults += sample_log_differences(ours, theirs, "the baseline")
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
    return Check(name="samples", passed=False, reason=reason)


def _why_different(ours: GlobalSteps, theirs: GlobalSteps) -> str | None:
    """Return why the tensors may differ although nothing is wrong; None if they may not."""
    if not (ours.samples_known and theirs.samples_known):
        return f"the samples of a step are not known, so the batches may differ; {_STATE_SAMPLES}"
    if len(ours.step) != len(theirs.step):
        return f"it took {len(ours.step)} steps, the baseline {len(theirs.step)}"
    return None


# Sample log: which samples every global step saw, the proof that trials used the same batches

# epoch and sorted sample ids of a global step, repetitions kept
StepSamples = tuple[int, "NDArray[np.int64]"]


def read_sample_log(files: TrialFiles) -> dict[int, StepSamples]:
    """Join all ranks' sample logs by global step; empty if no rank wrote one.

    Raises DataError if a row is damaged, or if ranks disagree on the epoch of a step.
    """
    parts = [read_table(rank_files.sample_log, SampleLogRow) for _, rank_files in files.ranks()]
    if not any(len(part) for part in parts):
        return {}
    steps = (
        pl.concat(parts)
        .group_by("step")
        .agg(
            pl.col("epoch").min(),
            pl.col("epoch").max().alias("last_epoch"),
            pl.col("sample_ids").explode().drop_nulls().sort(),
        )
        .sort("step")
    )
    unequal = steps.filter(pl.col("epoch") != pl.col("last_epoch"))
    if not unequal.is_empty():
        step, first, last = unequal.select("step", "epoch", "last_epoch").row(0)
        raise DataError(
            f"{files.root}: sample logs of its ranks put step {step} in epoch {first} and in "
            f"epoch {last}; expected one epoch"
        )
    return {
        step: (epoch, ids.to_numpy())
        for step, epoch, ids in zip(
            steps["step"].to_list(), steps["epoch"].to_list(), steps["sample_ids"], strict=True
        )
    }


def sample_log_faults(sample_log: Mapping[int, StepSamples]) -> list[str]:
    """List the faults of one sample log: missing steps, repeated samples, unequal epochs."""
    steps = list(sample_log)
    faults = []
    if steps != list(range(len(steps))):
        missing = sorted(set(range(max(steps) + 1)) - set(steps))
        faults.append(f"steps {some(missing)} are missing")
    by_epoch: dict[int, list[NDArray[np.int64]]] = {}
    for epoch, ids in sample_log.values():
        by_epoch.setdefault(epoch, []).append(ids)
    epochs = {epoch: np.sort(np.concatenate(parts)) for epoch, parts in by_epoch.items()}
    for epoch, ids in epochs.items():
        twice = np.unique(ids[1:][ids[1:] == ids[:-1]])
        if len(twice):
            faults.append(f"epoch {epoch} saw samples {some(twice.tolist())} more than once")
    # every epoch but the last is complete, so all of these saw the same samples
    whole = [epochs[e] for e in sorted(epochs)[:-1]]
    for epoch, ids in zip(sorted(epochs)[1:], whole[1:], strict=False):
        if not np.array_equal(ids, whole[0]):
            faults.append(f"epoch {epoch} did not see the samples of epoch 0")
    if whole and not np.isin(epochs[max(epochs)], whole[0]).all():
        faults.append(f"epoch {max(epochs)} saw samples that epoch 0 did not")
    return faults


def sample_log_differences(
    sample_log: Mapping[int, StepSamples], other: Mapping[int, StepSamples], name: str
) -> list[str]:
    """List the differences from `other`, which is called `name` in the sentences."""
    faults = []
    if len(sample_log) != len(other):
        faults.append(f"{len(sample_log)} steps, {name} has {len(other)}")
    wrong = [
        step
        for step in sorted(set(sample_log) & set(other))
        if not np.array_equal(sample_log[step][1], other[step][1])
    ]
    if wrong:
        faults.append(f"steps {some(wrong)} saw other samples than {name}")
    return faults


def planned_log(order: SampleOrder) -> dict[int, StepSamples]:
    """Return the sample log that follows from the planned order of samples."""
    planned = (order.step(step) for step in range(order.steps))
    return {p.step: (p.epoch, np.sort(p.sample_ids)) for p in planned}


def some(numbers: Sequence[object]) -> str:
    """Return the first ones in words, and how many there are."""
    shown = ", ".join(str(n) for n in numbers[:5])
    return shown if len(numbers) <= 5 else f"{shown}, ... ({len(numbers)} in all)"
