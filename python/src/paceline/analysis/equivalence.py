"""Check from files that a trial trained the same as its baseline.

What is compared: the sample log, the training's values, the initial weights, the first step's
loss and gradient, and the final weights relative to how far training moved them (so a broken
reducer shows even where few steps with a small learning rate move the weights little). The
tolerances are in `tolerances`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.analysis.checks import (
    Check,
    gradient_check,
    initial_weights_check,
    loss_check,
    not_judged,
    sample_log_check,
    training_check,
    weights_check,
)
from paceline.analysis.reading import load_trial
from paceline.analysis.steps import global_steps
from paceline.analysis.tolerances import tolerance
from paceline.errors import DataError
from paceline.records.files import read_json, write_json
from paceline.records.rows import SCHEMA

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.plan.schedule import Schedule
    from paceline.plan.trial import Trial
    from paceline.records.layout import TrialFiles


def why_not_equivalent(trial: Trial) -> str | None:
    """Explain why a trial is lossy and may end differently; None if it is exact."""
    return " and ".join(trial.inexact_reasons) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """What the checks of one trial against its baseline found."""

    trial_id: str
    baseline_id: str
    arithmetic: str
    checks: tuple[Check, ...]
    max_abs_weight_diff: float | None
    # why it may end otherwise than the baseline; then only what must be equal all the same counts
    does_not_apply: str | None = None

    @property
    def equivalent(self) -> bool | None:
        """True if every decisive check passed, False if one failed, None if one could not be, or
        if there is nothing to be equivalent."""
        results = [c.passed for c in self.checks if c.decisive]
        if False in results:
            return False
        return None if None in results or self.does_not_apply is not None else True

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "trial_id": self.trial_id,
            "baseline_id": self.baseline_id,
            "equivalent": self.equivalent,
            "does_not_apply": self.does_not_apply,
            "arithmetic": self.arithmetic,
            "max_abs_weight_diff": _finite(self.max_abs_weight_diff),
            "checks": [{**dataclasses.asdict(c), "value": _finite(c.value)} for c in self.checks],
        }


def check_equivalence(
    trial_files: TrialFiles, baseline_files: TrialFiles, schedule: Schedule | None = None
) -> Equivalence:
    """Compare a finished trial with its baseline and write `equivalence.json`.

    schedule: the planned samples, where the caller knows them; the sample log is then
    checked against them as well as against the baseline's.
    Raises DataError if a file of either is damaged.
    """
    trial, baseline = load_trial(trial_files), load_trial(baseline_files)
    steps = global_steps(trial)
    allowed = tolerance(
        trial.trial.training.precision,
        baseline.trial.training.precision,
        len(steps.step),
    )
    weights, largest = weights_check(trial, baseline, allowed)
    gradient = gradient_check(trial, baseline, allowed)
    reason = why_not_equivalent(trial.trial)
    if reason is not None:
        weights, gradient = not_judged(weights, reason), not_judged(gradient, reason)
    equivalence = Equivalence(
        trial_id=trial.trial.id,
        baseline_id=baseline.trial.id,
        arithmetic=allowed.arithmetic,
        checks=(
            sample_log_check(trial, baseline, schedule),
            training_check(trial, baseline),
            initial_weights_check(trial, baseline),
            loss_check(steps, global_steps(baseline), allowed),
            gradient,
            weights,
        ),
        max_abs_weight_diff=largest,
        does_not_apply=reason,
    )
    write_json(trial_files.equivalence, equivalence.to_json())
    return equivalence


def read_equivalence(path: Path) -> Equivalence:
    """Read what `check_identity` wrote. Raises DataError if it is damaged."""
    document = read_json(path)
    known = {f.name for f in dataclasses.fields(Check)}
    try:
        checks = [
            Check(**{name: value for name, value in check.items() if name in known})
            for check in document["checks"]
        ]
        return Equivalence(
            trial_id=document["trial_id"],
            baseline_id=document["baseline_id"],
            arithmetic=document["arithmetic"],
            checks=tuple(checks),
            max_abs_weight_diff=document["max_abs_weight_diff"],
            does_not_apply=document.get("does_not_apply"),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: expected what the equivalence check writes: {error!r}") from error


def equivalence_of(trial_files: TrialFiles, baseline_files: TrialFiles) -> Equivalence:
    """The equivalence as written down, else checked now.

    A trial's tensors may be deleted once it was checked, so what was found then holds, unless it
    was against another baseline and the tensors are still there.
    """
    if trial_files.equivalence.exists():
        found = read_equivalence(trial_files.equivalence)
        same = found.baseline_id == baseline_files.root.name
        if same or not trial_files.weights.exists():
            return found
    return check_equivalence(trial_files, baseline_files)


def _finite(value: float | None) -> float | None:
    """JSON has no nan and no infinity."""
    return value if value is not None and math.isfinite(value) else None
