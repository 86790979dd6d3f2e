"""Is a trial the same training as the baseline? Checked from files, and written down with reasons.

What is compared: the sample ledger, the training's values, the initial weights, the first step's
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
    ledger_check,
    loss_check,
    not_judged,
    training_check,
    weights_check,
)
from paceline.analysis.compression import why_not_identical
from paceline.analysis.reading import load_trial
from paceline.analysis.steps import global_steps
from paceline.analysis.tolerances import tolerance
from paceline.errors import DataError
from paceline.records.files import read_json, write_json

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.plan.schedule import Schedule
    from paceline.records.layout import TrialFiles

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What the checks of one trial against its baseline found."""

    trial_id: str
    baseline_id: str
    arithmetic: str
    checks: tuple[Check, ...]
    max_abs_weight_diff: float | None
    # why it may end otherwise than the baseline; then only what must be equal all the same counts
    does_not_apply: str | None = None

    @property
    def identical(self) -> bool | None:
        """True if every decisive check passed, False if one failed, None if one could not be, or
        if there is nothing to be identical."""
        results = [c.passed for c in self.checks if c.decisive]
        if False in results:
            return False
        return None if None in results or self.does_not_apply is not None else True

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "trial_id": self.trial_id,
            "baseline_id": self.baseline_id,
            "identical": self.identical,
            "does_not_apply": self.does_not_apply,
            "arithmetic": self.arithmetic,
            "max_abs_weight_diff": _finite(self.max_abs_weight_diff),
            "checks": [{**dataclasses.asdict(c), "value": _finite(c.value)} for c in self.checks],
        }


def check_identity(
    trial_files: TrialFiles, baseline_files: TrialFiles, schedule: Schedule | None = None
) -> Identity:
    """Compare a finished trial with its baseline and write `identity.json`.

    schedule: the planned samples, where the caller knows them; the ledger is then checked against
    them as well as against the baseline's.
    Raises DataError if a file of either is damaged.
    """
    trial, baseline = load_trial(trial_files), load_trial(baseline_files)
    allowed = tolerance(
        trial.trial.training.precision,
        baseline.trial.training.precision,
        len(global_steps(trial).step),
    )
    weights, largest = weights_check(trial, baseline, allowed)
    gradient = gradient_check(trial, baseline, allowed)
    reason = why_not_identical(trial.trial)
    if reason is not None:
        weights, gradient = not_judged(weights, reason), not_judged(gradient, reason)
    identity = Identity(
        trial_id=trial.trial.id,
        baseline_id=baseline.trial.id,
        arithmetic=allowed.arithmetic,
        checks=(
            ledger_check(trial, baseline, schedule),
            training_check(trial, baseline),
            initial_weights_check(trial, baseline),
            loss_check(trial, baseline, allowed),
            gradient,
            weights,
        ),
        max_abs_weight_diff=largest,
        does_not_apply=reason,
    )
    write_json(trial_files.identity, identity.to_json())
    return identity


def read_identity(path: Path) -> Identity:
    """Read what `check_identity` wrote. Raises DataError if it is damaged."""
    document = read_json(path)
    known = {f.name for f in dataclasses.fields(Check)}
    try:
        checks = [
            Check(**{name: value for name, value in check.items() if name in known})
            for check in document["checks"]
        ]
        return Identity(
            trial_id=document["trial_id"],
            baseline_id=document["baseline_id"],
            arithmetic=document["arithmetic"],
            checks=tuple(checks),
            max_abs_weight_diff=document["max_abs_weight_diff"],
            does_not_apply=document.get("does_not_apply"),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: expected what the identity check writes: {error!r}") from error


def identity_of(trial_files: TrialFiles, baseline_files: TrialFiles) -> Identity:
    """The identity as written down, else checked now.

    A trial's tensors may be deleted once it was checked, so what was found then holds, unless it
    was against another baseline and the tensors are still there.
    """
    if trial_files.identity.exists():
        found = read_identity(trial_files.identity)
        same = found.baseline_id == baseline_files.root.name
        if same or not trial_files.weights.exists():
            return found
    return check_identity(trial_files, baseline_files)


def _finite(value: float | None) -> float | None:
    """JSON has no nan and no infinity."""
    return value if value is not None and math.isfinite(value) else None
