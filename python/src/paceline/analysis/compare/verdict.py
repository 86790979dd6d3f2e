"""The verdict on one workload: the fastest configuration, by how much, and why."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.analysis.compare.ranking import Ranking
from paceline.analysis.compare.row import Row
from paceline.analysis.explain.evidence import CAUSE_PARTS
from paceline.analysis.explain.explanation import EXPLAINS, Explanation
from paceline.analysis.statistics.fastest import Fastest
from paceline.analysis.statistics.intervals import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class MainPart:
    """The part of a step that makes at least half of a difference, seconds per step."""

    phase: str  # one of analysis.explain.parts
    faster_s: float
    slower_s: float
    label: str | None = None  # of a cause that can explain at least half; None: no evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherEffect:
    """Speeds of configurations that differ in their launcher, and in nothing else."""

    fastest: str  # configuration
    ratios: Mapping[str, Interval]  # speed of each other one over that of the fastest
    makes_difference: bool | None  # one is separated; False: all are ties; None: not decided


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The fastest configuration of a workload among those that are equivalent."""

    workload: str
    has_noise: bool  # False: with one repeat nothing can be said of differences
    margin: float  # of a tie, as a share of the speed
    # configuration; None if none is equivalent, or if the noise between repeats is unknown
    best: str | None = None
    not_separated: tuple[str, ...] = ()  # those that may be the fastest as well, without the best
    ties: tuple[str, ...] = ()  # those of them that are shown to be within the margin of the best
    speedup: Interval | None = None  # of the best over the baseline
    runner_up: str | None = None  # the fastest configuration that is separated from the best
    over_runner_up: Interval | None = None  # speed of the best over that of the runner-up
    cause: MainPart | None = None  # None: the difference is spread over several parts
    # ratio - 1: the smallest difference from the best that this run finds in 80 % of cases
    detectable: float | None = None
    further_repeats: int | None = None  # expected number that would decide; None: none or unknown
    no_baseline: str | None = None  # why no baseline has finished
    launchers: LauncherEffect | None = None  # None: no two rows differ in the launcher alone
    # those of the above that differ from the best in launcher and transport, and in nothing else
    other_launcher_and_transport: tuple[str, ...] = ()
    sentence: str = ""  # with which the report states it


def make_verdict(
    workload: str,
    rows: Sequence[Row],
    ranking: Ranking,
    found: Fastest,
    explain: Callable[[str, str], Explanation],
    *,
    no_baseline: str | None = None,
) -> Verdict:
    """Judge the rows of one workload, which are in the order of their rank.

    found: the fastest of the ranked rows. explain: the difference in speed of two configurations.
    no_baseline: why no baseline has finished.
    """
    ranked = [row for row in rows if row.ranked]
    is_decidable = ranking.rates.has_noise or len(ranked) == 1
    best = next((row for row in ranked if row.configuration == found.leader), None)
    verdict = Verdict(
        workload=workload,
        has_noise=ranking.rates.has_noise,
        margin=ranking.margin,
        no_baseline=no_baseline,
    )
    if best is None or not is_decidable:
        return replace(verdict, not_separated=tuple(row.configuration for row in ranked))
    name, near = best.configuration, {found.leader, *found.not_separated}
    behind = next((row for row in ranked if row.configuration not in near), None)
    cause, over = None, None
    if behind is not None:
        over = ranking.rates.ratio(name, behind.configuration)
        if best.goal.steps_to_target == behind.goal.steps_to_target:
            cause = main_part(explain(name, behind.configuration), name)
    return replace(
        verdict,
        best=name,
        not_separated=found.not_separated,
        ties=found.ties,
        speedup=best.speed.speedup if ranking.target is None else best.goal.target_speedup,
        runner_up=None if behind is None else behind.configuration,
        over_runner_up=over,
        cause=cause,
        detectable=found.detectable,
        further_repeats=found.further_repeats,
        launchers=launcher_effect(ranked, ranking),
        other_launcher_and_transport=tuple(
            row.configuration
            for row in ranked
            if (row is behind or row.configuration in near) and differ_in_both(best, row)
        ),
    )


def launcher_effect(ranked: Sequence[Row], ranking: Ranking) -> LauncherEffect | None:
    """Compare rows that differ in the launcher alone: those of the fastest row, else the most.

    ranked: in the order of their rank. `local` is left out, as in `differ_in_both`.
    """
    alike: dict[Hashable, list[Row]] = {}
    for row in ranked:
        if row.setup.launcher != "local":
            alike.setdefault(_beside_launcher(row), []).append(row)
    several = [same for same in alike.values() if len({row.setup.launcher for row in same}) > 1]
    if not several:
        return None
    chosen = max(several, key=lambda same: (same[0] is ranked[0], len(same)))
    found = ranking.fastest(row.configuration for row in chosen)
    ratios = {
        row.configuration: ratio
        for row in chosen
        if found.leader is not None and row.configuration != found.leader
        if (ratio := ranking.rates.ratio(row.configuration, found.leader)) is not None
    }
    if found.leader is None or not ratios:
        return None
    return LauncherEffect(
        fastest=found.leader,
        ratios=ratios,
        makes_difference=True if found.separated else None if found.undecided else False,
    )


def _beside_launcher(row: Row) -> Hashable:
    """Identify everything but the launcher."""
    setup, training = row.setup, row.training
    return (
        setup.local_strategy,
        setup.layout,
        setup.transport,
        setup.labels,
        setup.details,
        row.placement.device,
        training.precision,
        training.memory_format,
    )


def differ_in_both(first: Row, second: Row) -> bool:
    """Return whether launcher and transport differ where a reader would compare launchers.

    Rows of `local` run on one node only, so nobody compares them with other launchers.
    """
    if "local" in (first.setup.launcher, second.setup.launcher):
        return False
    both = [
        (row.setup.local_strategy, row.setup.layout, row.training.precision, row.setup.labels)
        for row in (first, second)
    ]
    return (
        both[0] == both[1]
        and first.setup.launcher != second.setup.launcher
        and first.setup.transport != second.setup.transport
    )


def main_part(explanation: Explanation, faster: str) -> MainPart | None:
    """Return the part that makes at least half of the difference; None if there is none.

    Its difference must be significant. Its cause is the first of `paceline explain` that acts on it
    and can explain half of the difference.
    """
    if explanation.faster != faster or not explanation.is_significant:
        return None
    part = max(explanation.parts, key=lambda part: part.difference_s.mean)
    if part.difference_s.low <= 0 or (part.share or 0.0) < EXPLAINS:
        return None
    causes = (
        cause.label
        for cause in explanation.causes
        if cause.share >= EXPLAINS and any(part.part in CAUSE_PARTS[name] for name in cause.parts)
    )
    return MainPart(
        phase=part.part,
        faster_s=part.faster_s,
        slower_s=part.slower_s,
        label=next(causes, None),
    )
