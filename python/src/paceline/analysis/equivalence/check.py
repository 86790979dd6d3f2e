"""Check from files that a trial trained the same as its baseline.

What is compared: the sample log, the training's values, the initial weights, the first step's
loss and gradient, the weights after 16 steps and at the end, relative to how far training moved
them (so a broken reducer shows even where few steps with a small learning rate move the weights
little), and the values of evaluations. Of a long training, two steps from the middle and two from
the end are replayed and compared, in place of the final weights. The replicas of the trial must end
with equal weights, bit for bit. The tolerances are in `tolerances`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import computed_field
from pydantic.dataclasses import dataclass

from paceline.analysis.equivalence.checks import (
    Check,
    began_differently,
    checks_of_statement,
    initial_weights_check,
    loss_check,
    not_judged,
    sample_log_check,
    script_checks,
    training_check,
)
from paceline.analysis.equivalence.record_checks import (
    REPLICAS,
    evaluation_check,
    every_step_check,
    replicas_check,
    update_check,
)
from paceline.analysis.equivalence.shown import Shown
from paceline.analysis.equivalence.tensor_checks import (
    FINAL_WEIGHTS,
    REPLAY,
    early_weights_check,
    gradient_check,
    replay_checks,
    weights_check,
)
from paceline.analysis.equivalence.tolerances import tolerance
from paceline.analysis.trial.evaluation import read_evaluations
from paceline.analysis.trial.reading import TrialRecord, load_trial, why_not_equivalent
from paceline.analysis.trial.steps import global_steps
from paceline.analysis.trial.stragglers import read_updates
from paceline.base.errors import DataError
from paceline.measure.records.files import document, jsonable, write_json
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.phases import GRADIENT
from paceline.measure.records.rows import SCHEMA
from paceline.plan.trials.sample_order import SampleOrder

Grade = Literal["whole", "start"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """Results of the checks of one trial against its baseline."""

    trial_id: str
    baseline_id: str
    arithmetic: str
    checks: tuple[Check, ...]
    max_abs_weight_diff: float | None
    # why it may end differently from the baseline; then only the other checks count
    lossy: str | None = None
    shown: Shown | None = None  # of a script; of its whole training, too
    schema: int = SCHEMA

    @computed_field  # type: ignore[prop-decorator]
    @property
    def equivalent(self) -> bool | None:
        """True if every decisive check passed, False if one failed.

        None if one could not be made, or if the trial is lossy on purpose.
        """
        results = [c.passed for c in self.checks if c.decisive]
        if False in results:
            return False
        return None if None in results or self.lossy is not None else True

    @property
    def faults(self) -> list[str]:
        """The decisive checks that failed, with their reasons."""
        return [f"{c.name}: {c.reason}" for c in self.checks if c.decisive and c.passed is False]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def grade(self) -> Grade | None:
        """The part of the training that the checks cover; None if it is not equivalent.

        "whole" needs equal replicas, and either the final weights or all replays.
        """
        if self.equivalent is not True:
            return None
        passed = {c.name: c.passed is True and c.decisive for c in self.checks}
        replays = [result for name, result in passed.items() if name.startswith(REPLAY)]
        covers_the_end = passed.get(FINAL_WEIGHTS) or (replays and all(replays))
        return "whole" if covers_the_end and passed.get(REPLICAS) else "start"


def check_equivalence(
    trial_files: TrialFiles,
    baseline_files: TrialFiles,
    order: SampleOrder | None = None,
    shown: Shown | None = None,
) -> Equivalence:
    """Compare a finished trial with its baseline.

    order: the planned samples, where the caller knows them; the sample log is then
    checked against them as well as against the baseline's. shown: of the first steps of a script,
    as `paceline verify` finds it; it decides.
    Raises DataError if a file of either is damaged.
    """
    trial, baseline = load_trial(trial_files), load_trial(baseline_files)
    steps = global_steps(trial)
    allowed = tolerance(
        trial.trial.training.arithmetic,
        baseline.trial.training.arithmetic,
        len(steps.step),
        rounding=measured_rounding(baseline),
        noise=() if baseline.result is None else baseline.result.replayed.noise,
        global_batch=baseline.trial.training.global_batch,
    )
    weights, largest = weights_check(trial, baseline, allowed)
    gradient = gradient_check(trial, baseline, allowed)
    early = early_weights_check(trial, baseline, allowed)
    later = (*([] if early is None else [early]), *replay_checks(trial, baseline, allowed))
    replicas, every_step = replicas_check(trial), every_step_check(trial, baseline)
    reason = why_not_equivalent(trial.trial)
    if reason is not None:
        weights, gradient = not_judged(weights, reason), not_judged(gradient, reason)
        later = ()
    their_steps = global_steps(baseline)
    loss = loss_check(steps, their_steps, allowed)
    if trial.trial.reduction.updates_within_step:
        loss = not_judged(loss, "weights change within a step")
    elif trial.trial.training.batch_norm == "per-replica":
        loss = not_judged(loss, "layers do not normalise over the global batch")
    checks: tuple[Check, ...]
    if trial.trial.training.script is None:
        checks = (
            sample_log_check(trial, baseline, order),
            training_check(trial, baseline),
            initial_weights_check(trial, baseline),
            *(loss, gradient, *later, every_step, weights, replicas),
        )
        if trial.trial.training.evaluation is not None:
            values = evaluation_check(
                read_evaluations(trial, steps), read_evaluations(baseline, their_steps), allowed
            )
            checks += (values if reason is None else not_judged(values, reason),)
    else:
        both = (steps, their_steps)
        if began_differently(trial):
            replicas = not_judged(replicas, "its ranks began with different weights")
        whole = (*script_checks(trial, baseline, both, (loss, gradient, weights)), replicas)
        if shown is not None:
            shown, whole = checks_of_statement(shown, whole)
        checks = (training_check(trial, baseline), *whole)
    updates = read_updates(trial)
    if updates is not None:
        checks += (update_check(updates, trial.trial.option("staleness_bound_steps")),)
    return Equivalence(
        trial_id=trial.trial.id,
        baseline_id=baseline.trial.id,
        arithmetic=allowed.arithmetic,
        checks=checks,
        max_abs_weight_diff=largest,
        lossy=reason,
        shown=shown,
    )


def measured_rounding(baseline: TrialRecord) -> dict[str, float]:
    """Return the changes by rounding that the baseline has measured."""
    result = baseline.result
    if result is None:
        return {}
    sensitivity = result.gradient_sensitivity
    if sensitivity is None:
        return result.replayed.rounding
    return {GRADIENT: sensitivity}


def write_equivalence(trial_files: TrialFiles, equivalence: Equivalence) -> None:
    """Write `equivalence.json`. Only the run itself does, commands that read a run do not."""
    write_json(trial_files.equivalence, jsonable(equivalence))


def read_equivalence(path: Path) -> Equivalence:
    """Read what `write_equivalence` wrote. Raises DataError if it is damaged or missing."""
    found = document(path, Equivalence)
    if found is None:
        raise DataError(f"{path}: no such file")
    return found


def equivalence_of(trial_files: TrialFiles, baseline_files: TrialFiles) -> Equivalence:
    """Read the equivalence, or check it now if that was not done yet.

    A trial's tensors may be deleted once it was checked, so the earlier result holds, unless it
    used another baseline and the tensors still exist.
    """
    if trial_files.equivalence.exists():
        found = read_equivalence(trial_files.equivalence)
        same = found.baseline_id == baseline_files.root.name
        if same or not trial_files.weights.exists():
            return found
    return check_equivalence(trial_files, baseline_files)


def equivalence_baseline(
    record: TrialRecord, baselines: Iterable[TrialRecord]
) -> TrialFiles | None:
    """Return the baseline trial to check against: of the same seed, and if possible of equal
    arithmetic and with tensors."""
    wanted = record.trial.training.arithmetic
    best = min(
        (b for b in baselines if b.trial.training.seed == record.trial.training.seed),
        key=lambda b: (
            b.trial.training.arithmetic != wanted,
            not b.files.weights.exists(),
            *plainness(b),
        ),
        default=None,
    )
    return None if best is None else best.files


def plainness(record: TrialRecord) -> tuple[bool, bool, bool, int]:
    """Return the order in which baselines are preferred, the plainest one first."""
    training = record.trial.training
    return (
        training.arithmetic != "fp32",
        training.compile or training.accumulation_steps is not None,
        training.memory_format != "contiguous",
        record.trial.repeat,
    )
