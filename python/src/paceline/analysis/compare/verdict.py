"""The verdict on one workload: the fastest configuration, by how much, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.analysis.compare.row import Row
    from paceline.analysis.explain.explanation import Explanation
    from paceline.analysis.statistics.pairwise import Pairwise
    from paceline.analysis.statistics.series import Interval

EXPLAINS = 0.5  # of the difference: a part that explains less is not the cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The part of a step that explains at least half of a difference, seconds per step."""

    phase: str  # one of analysis.explain.parts
    faster_s: float
    slower_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The fastest configuration of a workload among those that are equivalent."""

    workload: str
    best: str | None  # configuration; None if none is equivalent
    tied: tuple[str, ...]  # no significant difference from the best
    speedup: Interval | None  # of the best over the baseline
    runner_up: str | None  # the fastest configuration that is not tied with the best
    over_runner_up: Interval | None  # speed of the best over that of the runner-up
    cause: Cause | None  # None: the difference is spread over several parts
    no_baseline: str | None = None  # why no baseline has finished


def make_verdict(
    workload: str,
    rows: Sequence[Row],
    pairs: Pairwise,
    ratio: Callable[[str, str], Interval | None],
    explain: Callable[[str, str], Explanation],
    *,
    no_baseline: str | None = None,
) -> Verdict:
    """Judge the rows of one workload, which are in the order of their rank.

    ratio: of the speeds of two configurations, or with a target of the speeds of reaching it.
    explain: their difference in speed. no_baseline: why no baseline has finished.
    """
    ranked = [row for row in rows if row.ranked]
    target = next((row.target for row in rows if row.target is not None), None)
    if not ranked:
        return Verdict(
            workload=workload,
            best=None,
            tied=(),
            speedup=None,
            runner_up=None,
            over_runner_up=None,
            cause=None,
            no_baseline=no_baseline,
        )
    best = ranked[0]
    tied = [r for r in ranked[1:] if pairs.is_tie(best.configuration, r.configuration)]
    behind = next((r for r in ranked[1:] if r not in tied), None)
    over = None if behind is None else ratio(best.configuration, behind.configuration)
    cause = None
    if behind is not None and best.steps_to_target == behind.steps_to_target:
        name = best.configuration
        cause = main_cause(explain(name, behind.configuration), name)
    return Verdict(
        workload=workload,
        best=best.configuration,
        tied=tuple(row.configuration for row in tied),
        speedup=best.speedup if target is None else best.target_speedup,
        runner_up=None if behind is None else behind.configuration,
        over_runner_up=over,
        cause=cause,
        no_baseline=no_baseline,
    )


def main_cause(explanation: Explanation, faster: str) -> Cause | None:
    """Return the part that explains at least half of the difference; None if there is none.

    None also if the mean steps are in another order than the medians.
    """
    part, whole = explanation.main_part, explanation.difference.difference_s
    if explanation.faster != faster:
        return None
    if part.difference_s.mean <= 0 or part.difference_s.mean < EXPLAINS * whole.mean:
        return None
    return Cause(phase=part.part, faster_s=part.faster_s, slower_s=part.slower_s)
