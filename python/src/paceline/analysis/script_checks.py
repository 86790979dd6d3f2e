"""The comparison of a user's script with its baseline: whether it can be made at all.

Paceline does not know which samples a script trains on. If gradient and weights agree with the
baseline's, the trainings were equivalent. If they do not, that proves something only if the script
started from the same weights and took the same number of samples in each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.analysis.checks import Check, initial_weights_check, not_judged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.analysis.reading import TrialRecord
    from paceline.analysis.steps import GlobalSteps

_STATE_SAMPLES = "state them with paceline.step(samples=...) or samples_per_step"


def script_checks(
    trial: TrialRecord,
    baseline: TrialRecord,
    steps: tuple[GlobalSteps, GlobalSteps],
    checks: Sequence[Check],
) -> tuple[Check, ...]:
    """Return the checks, undecided with one reason if they prove nothing.

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
