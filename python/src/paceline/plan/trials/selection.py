"""Selection by shell patterns: the trials to run with the baselines that they need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from paceline.base.errors import UsageError
from paceline.plan.trials.trial import Trial


def selected_trials(
    trials: Sequence[Trial], patterns: Sequence[str], baseline: str | None = None
) -> list[Trial]:
    """Return the trials whose configuration or id matches a shell pattern, in their order.

    The sequential baselines of their workloads are kept, in fp32 and in their own precision,
    because equivalence is checked against them, and the configurations of `baseline`, unless one of
    them is selected anyway. Without patterns all trials are returned.
    baseline: shell pattern of the configurations that speedups are relative to.
    Raises UsageError if a pattern matches nothing.
    """
    names = [trial.configuration for trial in trials]
    if baseline is not None and not matching(names, baseline):
        raise no_match("baseline", [baseline], names)
    if not patterns:
        return list(trials)
    unmatched = [p for p in patterns if not any(_matches(trial, p) for trial in trials)]
    if unmatched:
        raise no_match("only", unmatched, names)
    wanted = {trial.id for trial in trials if any(_matches(trial, p) for p in patterns)}
    if baseline is not None:
        chosen = {t.id for t in trials if fnmatchcase(t.configuration, baseline)}
        wanted |= set() if wanted & chosen else chosen
    selected = [trial for trial in trials if trial.id in wanted]
    for workload in {trial.training.workload for trial in selected}:
        precisions = {t.training.precision for t in selected if t.training.workload == workload}
        baselines = [t for t in trials if t.is_baseline and t.training.workload == workload]
        same = [t for t in baselines if t.training.precision in {"fp32", *precisions}]
        wanted |= {trial.id for trial in same or baselines}
    return [trial for trial in trials if trial.id in wanted]


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names of configurations that match a shell pattern, each once."""
    return [name for name in dict.fromkeys(names) if fnmatchcase(name, pattern)]


def no_match(option: str, patterns: Sequence[str], names: Iterable[str]) -> UsageError:
    """Return the error about patterns that match none of the names."""
    known = list(dict.fromkeys(names))
    parts = [repr(f"*{pattern}*") for pattern in patterns if matching(known, f"*{pattern}*")]
    example = f", for example {', '.join(parts)}," if parts else ""
    listed = "".join(f"\n  - {name}" for name in known)
    return UsageError(
        f"{option}: no configuration matches {', '.join(map(repr, patterns))}; expected shell "
        f"patterns (*, ?, [...]){example} of these names:{listed}"
    )


def _matches(trial: Trial, pattern: str) -> bool:
    return fnmatchcase(trial.configuration, pattern) or fnmatchcase(trial.id, pattern)
