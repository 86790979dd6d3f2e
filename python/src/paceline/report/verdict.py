"""The verdict on a workload as a sentence, and the document of `paceline compare --json`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.analysis.compare.labels import short_name
from paceline.analysis.compare.verdict import Verdict
from paceline.analysis.explain.parts import PART_LABELS
from paceline.analysis.trial.configuration import TIMES
from paceline.records.files import jsonable
from paceline.report.wording import bounds, listed, milliseconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.analysis.compare.result import Comparison
    from paceline.analysis.compare.row import Row
    from paceline.analysis.compare.verdict import Cause
    from paceline.analysis.statistics.series import Interval

_MOST_NAMED = 3  # tied configurations in a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedVerdict(Verdict):
    """A verdict with its sentence."""

    sentence: str


def stated_verdicts(comparison: Comparison) -> dict[str, StatedVerdict]:
    """Return the verdict on each workload with its sentence."""
    return {
        workload: StatedVerdict(
            **{each.name: getattr(verdict, each.name) for each in dataclasses.fields(verdict)},
            sentence=verdict_sentence(comparison, workload),
        )
        for workload, verdict in comparison.verdicts.items()
    }


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """Return the document of `paceline compare --json`."""
    document = comparison.to_json()
    stated = stated_verdicts(comparison)
    for workload, found in document["workloads"].items():
        found["verdict"] = jsonable(stated[workload])
    if len(stated) == 1:
        document["verdict"] = document["workloads"][comparison.workloads[0]]["verdict"]
    return document


def verdict_sentence(comparison: Comparison, workload: str) -> str:
    """Name the fastest configuration of a workload, by how much it is faster, and why."""
    verdict, rows = comparison.verdicts[workload], comparison.rows_of(workload)
    if verdict.best is None:
        target = next((row.target for row in rows if row.target is not None), None)
        missed = None if target is None else f"none reached the target ({target})"
        reason = verdict.no_baseline or missed
        reason = reason or "none was shown to be equivalent to the baseline"
        return f"No configuration is ranked, because {reason}."
    return _sentence(
        rows,
        [comparison.row(name) for name in verdict.tied],
        None if verdict.runner_up is None else comparison.row(verdict.runner_up),
        verdict.over_runner_up,
        verdict.cause,
        _baseline_words(rows, comparison.sequential.get(workload)),
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
