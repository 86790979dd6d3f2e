"""Explain the differences within one run: a pair, or the fastest configuration and all others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from paceline.analysis.explain.difference import part_noise
from paceline.analysis.explain.explanation import ExplainedTrials, Explanation, explain
from paceline.errors import NotComparable, UsageError
from paceline.plan.selection import matching, no_match

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.analysis.compare.result import Comparison
    from paceline.analysis.explain.difference import PartNoise
    from paceline.analysis.trial.reading import TrialRecord

_THREADS = 4  # reading, Polars and NumPy release the interpreter lock most of the time


def explain_pair(comparison: Comparison, first: str, second: str) -> Explanation:
    """Explain the difference of two configurations.

    first, second: names, or shell patterns that match one configuration each.
    Raises UsageError if a pattern matches none or several, NotComparable if they belong to
    different workloads or have no steps.
    """
    names = [configuration_like(comparison, pattern) for pattern in (first, second)]
    if names[0] == names[1]:
        raise UsageError(
            f"{first!r} and {second!r}: expected two configurations, both are {names[0]}; compare "
            "two of its trials with --pair ID ID"
        )
    workloads = [comparison.row(name).workload for name in names]
    if workloads[0] != workloads[1]:
        raise NotComparable(
            f"expected two configurations of one workload, got {workloads[0]} and {workloads[1]}; "
            "their steps are different work"
        )
    sides = [explained(comparison, name) for name in names]
    return explain(sides[0], sides[1], noise_of(comparison, workloads[0]))


def explain_trials(comparison: Comparison, first: TrialRecord, second: TrialRecord) -> Explanation:
    """Explain the difference of two trials, which may be of one configuration."""
    workloads = [record.trial.training.workload for record in (first, second)]
    if workloads[0] != workloads[1]:
        raise NotComparable(
            f"expected two trials of one workload, got {workloads[0]} and {workloads[1]}; their "
            "steps are different work"
        )
    sides = [ExplainedTrials(record.trial.id, [record]) for record in (first, second)]
    return explain(sides[0], sides[1], noise_of(comparison, workloads[0]))


def explain_workload(
    comparison: Comparison, workload: str, most: int | None = None
) -> list[Explanation]:
    """Explain the fastest configuration of a workload against each of the others, in their order.

    Configurations that are not ranked are left out: their steps are other work, or were not
    measured. most: the number of explanations, None for all.
    """
    ranked = [row.configuration for row in comparison.rows_of(workload) if row.ranked]
    ranked = ranked if most is None else ranked[: most + 1]
    if len(ranked) < 2:
        return []
    with ThreadPoolExecutor(_THREADS) as pool:
        sides = list(pool.map(lambda name: explained(comparison, name), ranked))
    noise = noise_of(comparison, workload)
    return [explain(sides[0], side, noise) for side in sides[1:]]


def explained(comparison: Comparison, configuration: str) -> ExplainedTrials:
    """Read the finished trials of one configuration."""
    records = [trial.record for trial in comparison.trials.get(configuration, ())]
    return ExplainedTrials(configuration, records)


def noise_of(comparison: Comparison, workload: str) -> Mapping[str, PartNoise]:
    """Estimate the run-to-run noise of the parts from all configurations of a workload."""
    rows: Sequence[str] = [row.configuration for row in comparison.rows_of(workload)]
    return part_noise({n: comparison.trials[n] for n in rows if n in comparison.trials})


def configuration_like(comparison: Comparison, pattern: str) -> str:
    """Return the one configuration that matches a shell pattern.

    Raises UsageError if none or several match.
    """
    names = [row.configuration for row in comparison.rows]
    found = matching(names, pattern)
    if not found:
        raise no_match("configuration", [pattern], names)
    if len(found) > 1:
        listed = "".join(f"\n  - {name}" for name in found)
        raise UsageError(f"{pattern!r}: expected one configuration, it matches:{listed}")
    return found[0]
