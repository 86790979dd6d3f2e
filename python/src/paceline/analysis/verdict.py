"""The verdict on one workload: the fastest configuration, by how much, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.analysis.configuration import TIMES
from paceline.analysis.explain.parts import PART_LABELS
from paceline.analysis.labels import short_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.analysis.explain.explanation import Explanation
    from paceline.analysis.pairwise import Pairwise
    from paceline.analysis.row import Row
    from paceline.analysis.statistics import Interval

DASH = "\N{EN DASH}"
_MOST_NAMED = 3  # tied configurations in a sentence
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
    sentence: str


def make_verdict(
    workload: str,
    rows: Sequence[Row],
    pairs: Pairwise,
    ratio: Callable[[str, str], Interval | None],
    explain: Callable[[str, str], Explanation],
    *,
    sequential: str | None = None,
    no_baseline: str | None = None,
) -> Verdict:
    """Judge the rows of one workload, which are in the order of their rank.

    ratio: of the speeds of two configurations, or with a target of the speeds of reaching it.
    explain: their difference in speed. sequential: the configuration that equivalence is relative
    to; another baseline is named. no_baseline: why no baseline has finished.
    """
    ranked = [row for row in rows if row.ranked]
    target = next((row.target for row in rows if row.target is not None), None)
    if not ranked:
        missed = None if target is None else f"none reached the target ({target})"
        reason = no_baseline or missed or "none was shown to be equivalent to the baseline"
        return _nothing(workload, reason)
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
        sentence=_sentence(rows, tied, behind, over, cause, _baseline_words(rows, sequential)),
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


def milliseconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def bounds(interval: Interval) -> str:
    return f"{interval.low:.2f}{DASH}{interval.high:.2f}"


def _nothing(workload: str, reason: str) -> Verdict:
    return Verdict(
        workload=workload,
        best=None,
        tied=(),
        speedup=None,
        runner_up=None,
        over_runner_up=None,
        cause=None,
        sentence=f"No configuration is ranked, because {reason}.",
    )


def _sentence(
    rows: Sequence[Row],
    tied: Sequence[Row],
    behind: Row | None,
    over: Interval | None,
    cause: Cause | None,
    baseline: str,
) -> str:
    best = rows[0]
    name = short_name(best, rows)
    if len([row for row in rows if row.ranked]) == 1:
        if len([row for row in rows if not row.failed]) == 1:
            return f"Only {name} was measured, so there is nothing to compare."
        if best.time_to_target_s is None:
            return f"Only {name} is ranked: no other configuration was shown to be equivalent."
        only = f"Only {name} reached {best.target}{_speed(best, baseline)}."
        return " ".join([only, *_throughput_words(rows, behind)])
    fastest = "fastest" if best.target is None else f"the fastest to reach {best.target}"
    words = [f"{name} is {fastest}{_speed(best, baseline)}."]
    if tied:
        names = [short_name(row, rows) for row in tied[:_MOST_NAMED]]
        if len(tied) > _MOST_NAMED:
            names.append(f"{len(tied) - _MOST_NAMED} more")
        tie = "Tie" if best.target is None else f"Tie in reaching {best.target}"
        others = f"no significant difference from {listed(names)}"
        words = [f"{tie}: {name}{_speed(best, baseline)}; {others}."]
    if behind is not None and over is not None:
        next_one = short_name(behind, rows)
        words.append(
            f"It is {over.median:.2f}{TIMES} as fast as {next_one} ({bounds(over)})"
            f"{_why(best, behind, cause)}."
        )
    words += _throughput_words(rows, behind)
    if all(row.repeats == 1 for row in rows if row.ranked):
        words.append("With one repeat the run-to-run noise is unknown: this may be chance.")
    if any(row.is_unchecked_script for row in rows):
        words.append("Not all of them were checked for equivalence (see ?).")
    return " ".join(words)


def _baseline_words(rows: Sequence[Row], sequential: str | None) -> str:
    """Return "the baseline", with its name if it is not the sequential one."""
    row = next((row for row in rows if row.is_baseline), None)
    if row is None or row.configuration == sequential:
        return "the baseline"
    return f"the baseline {short_name(row, rows)}"


def _throughput_words(rows: Sequence[Row], behind: Row | None) -> list[str]:
    """Say which configuration has a higher throughput than the first to reach the target."""
    known = [r for r in rows if r.samples_per_s is not None and r.equivalent is not False]
    if rows[0].target is None or not known:
        return []
    highest = max(known, key=lambda row: row.samples_per_s.median if row.samples_per_s else 0.0)
    if highest.steps_to_target == rows[0].steps_to_target:
        return []
    name, own = short_name(highest, rows), f"{rows[0].steps_to_target:g}"
    if highest.time_to_target_s is None:
        return [f"{name} has the highest throughput, but missed the target."]
    if highest is behind:
        return ["The latter has the highest throughput."]
    steps = f"{highest.steps_to_target:g} steps to the target instead of {own}"
    return [f"{name} has the highest throughput, but needs {steps}."]


def _speed(best: Row, baseline: str) -> str:
    """Return the time to the target, if there is one, and the speedup of the best row."""
    speedup, time = best.speedup, ""
    if best.time_to_target_s is not None:
        speedup, time = best.target_speedup, f" in {milliseconds(best.time_to_target_s.median)}"
    if best.is_baseline:
        return f"{time} (the baseline)"
    if speedup is None:
        return time
    return f"{time}, {speedup.median:.2f}{TIMES} as fast as {baseline} ({bounds(speedup)})"


def _why(best: Row, behind: Row, cause: Cause | None) -> str:
    if best.steps_to_target != behind.steps_to_target:
        return (
            f", with {best.steps_to_target:g} steps to the target instead of "
            f"{behind.steps_to_target:g}"
        )
    if cause is not None:
        spent = f"{milliseconds(cause.faster_s)} instead of {milliseconds(cause.slower_s)} per step"
        return f", mainly because of {PART_LABELS[cause.phase]}: {spent}"
    measured = all(row.step_phases_s.get("forward") is not None for row in (best, behind))
    return "; the difference is spread over several parts" if measured else ""
