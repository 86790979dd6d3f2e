"""The trials that the user wants to run, and the baselines that they need."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.plan.trial import Trial


def selected_trials(trials: Sequence[Trial], patterns: Sequence[str]) -> list[Trial]:
    """Return the trials whose configuration or id matches a shell pattern, in their order.

    The sequential baselines of their workloads are kept, because equivalence is checked against
    them. Without patterns all trials are returned.
    Raises UsageError if a pattern matches nothing.
    """
    if not patterns:
        return list(trials)
    unmatched = [p for p in patterns if not any(_matches(trial, p) for trial in trials)]
    if unmatched:
        names = "".join(f"\n  - {name}" for name in dict.fromkeys(t.configuration for t in trials))
        raise UsageError(
            f"only: no configuration matches {', '.join(map(repr, unmatched))}; expected shell "
            f"patterns (*, ?, [...]) of these names, or of a name with its repeat (.r0):{names}"
        )
    wanted = {trial.id for trial in trials if any(_matches(trial, p) for p in patterns)}
    workloads = {trial.training.workload for trial in trials if trial.id in wanted}
    return [
        trial
        for trial in trials
        if trial.id in wanted or (trial.is_baseline and trial.training.workload in workloads)
    ]


def _matches(trial: Trial, pattern: str) -> bool:
    return fnmatchcase(trial.configuration, pattern) or fnmatchcase(trial.id, pattern)
