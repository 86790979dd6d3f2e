"""The commands that a user of a finished run probably wants next."""

from __future__ import annotations

import shlex
from pathlib import Path

from paceline.analysis.compare.result import Comparison
from paceline.report.verdict import MOST_FURTHER

Command = tuple[str, str]  # and what it is for
_MOST = 2


def next_commands(comparison: Comparison, run_dir: Path, *, is_shipped: bool) -> list[Command]:
    """Return at most two commands, the most useful first; none if nothing is ranked.

    is_shipped: the spec is one of Paceline's own.
    """
    ranked = [row for row in comparison.rows if row.ranked]
    if not ranked:
        return []
    run = shlex.quote(str(run_dir))
    found: list[Command] = []
    if any(_repeats_help(comparison, workload) for workload in comparison.workloads):
        found.append((f"paceline recommend {run} --measure", "To repeat what is not decided"))
    if any(len(comparison.trials[row.configuration]) > 1 for row in ranked) and len(ranked) > 1:
        found.append((f"paceline explain {run}", "To see why the others are slower"))
    if is_shipped:
        found.append(("paceline init my.toml", "To begin a spec for your own model and data"))
    found.append((f"paceline recommend {run}", "To choose by time, cost or memory"))
    return found[:_MOST]


def _repeats_help(comparison: Comparison, workload: str) -> bool:
    """Return whether a few more repeats are expected to decide, or the first one lacks another."""
    verdict = comparison.verdicts[workload]
    ranked = [row for row in comparison.rows_of(workload) if row.ranked]
    if not verdict.has_noise:
        return len(ranked) > 1
    return verdict.further_repeats is not None and verdict.further_repeats <= MOST_FURTHER
