"""Check that the baselines of two runs trained the same, so that the runs may be compared.

Within a run every configuration is compared with its baseline by gradients and weights, which are
deleted afterwards. What is left of a baseline are the values of its training, the checksum of its
initial weights, and the losses of its steps. Losses follow from the weights, so a changed update
shows in the losses of the next steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping  # see below
from dataclasses import dataclass

from paceline.analysis.equivalence.check import measured_rounding
from paceline.analysis.equivalence.tolerances import tolerance
from paceline.analysis.trial.reading import TrialRecord
from paceline.analysis.trial.steps import GlobalSteps

# The types of the fields are needed at run time, because references are read from JSON, too.
from paceline.plan.trials.trial import Training

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
