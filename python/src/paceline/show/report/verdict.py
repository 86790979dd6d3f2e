"""The verdict on a workload as a sentence, its document, and the commands that may follow."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.analysis.compare.row import Row, short_name
from paceline.analysis.compare.run import Comparison
from paceline.analysis.compare.verdict import MainPart, Verdict
from paceline.analysis.explain.evidence import PART_LABELS
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.trial.reading import TIMES
from paceline.show.report.wording import NO_STEP, NOT_KNOWN, bounds, listed, milliseconds

_MOST_NAMED = 3  # configurations in a sentence that may be the fastest as well
_MOST_FURTHER = 50  # repeats: more are not worth a proposal
_FEW, _MOST = 5, 100  # repeats: a good start, and those that a spec may have
_MOST_COMMANDS = 2

NextCommand = tuple[str, str]  # and what it is for


def with_sentences(comparison: Comparison) -> Comparison:
    """Return the comparison with the sentence of each verdict."""
    stated = {
        workload: replace(verdict, sentence=verdict_sentence(comparison, workload))
        for workload, verdict in comparison.verdicts.items()
    }
    return replace(comparison, verdicts=stated)


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """Return the document of `paceline compare --json`."""
    return with_sentences(comparison).to_json()


def verdict_sentence(comparison: Comparison, workload: str) -> str:
    """Name the fastest configuration of a workload, by how much it is faster, and why."""
    verdict, rows = comparison.verdicts[workload], comparison.rows_of(workload)
    ranked = [row for row in rows if row.ranked]
    baseline = _baseline_words(rows, comparison.sequential.get(workload))
    if not ranked:
        target = next((row.goal.target for row in rows if row.goal.target is not None), None)
        missed = None if target is None else f"none reached the target ({target})"
        has_steps = any(row.speed.step_s is not None for row in rows)
        unknown = "none was shown to be equivalent to the baseline" if has_steps else NO_STEP
        return f"No configuration is ranked, because {verdict.no_baseline or missed or unknown}."
    shown = {row.configuration: row for row in rows}
    best, behind = shown.get(verdict.best or ""), shown.get(verdict.runner_up or "")
    others = {*verdict.not_separated, verdict.runner_up} - {None, ranked[0].configuration}
    if verdict.best is not None and best is None:
        return f"The fastest configuration, {verdict.best}, is not among the rows shown."
    repeats = _repeats_that_help(comparison, workload)
    repeat = None if repeats is None else _command_to_repeat("RUN_DIR", repeats)
    if len(ranked) == 1 and not others:
        words = _single(ranked[0], rows, baseline)
    elif best is None:
        words = [_without_noise(ranked[0], rows, baseline)]
        words += [] if repeat is None else [f"`{repeat}` measures more."]
    else:
        speed, has_lead = _speed(best, baseline), verdict.over_runner_up is not None
        if behind is not None and behind.is_baseline and has_lead:
            speed += _why(best, behind, verdict.cause)
            behind = None  # the first sentence has the lead over the baseline
        words = [_first(verdict, best, rows, speed)]
        if behind is not None and has_lead:
            words.append(_next(verdict, best, behind, rows))
    if verdict.other_launcher_and_transport and best is not None:
        named = _named(verdict.other_launcher_and_transport, rows)
        words.append(f"Launcher and transport both differ from {named}.")
    words += _throughput_words(rows, behind)
    words += _power(verdict, repeat)
    if len(ranked) > 1 and any(row.is_unchecked_script for row in rows):
        words.append("Not all of them were checked for equivalence (see ?).")
    return " ".join(words)


def _single(only: Row, rows: Sequence[Row], baseline: str) -> list[str]:
    """Say that there is nothing to compare the only ranked configuration with."""
    name = short_name(only, rows)
    if len([row for row in rows if not row.failed]) == 1:
        return [f"Only {name} was measured, so there is nothing to compare."]
    if any(row.equivalence.other_rows for row in rows):
        return [f"Only {name} is ranked: the steps of all others have other samples."]
    if only.goal.time_to_target_s is None:
        return [f"Only {name} is ranked: no other configuration was shown to be equivalent."]
    return [f"Only {name} reached {only.goal.target}{_speed(only, baseline)}."]


def _without_noise(first: Row, rows: Sequence[Row], baseline: str) -> str:
    """Say why a run with one repeat has no verdict."""
    return (
        "No verdict: with one repeat the run-to-run noise is unknown, so differences may be "
        f"chance. {short_name(first, rows)} had the highest speed{_speed(first, baseline)}."
    )


def _first(verdict: Verdict, best: Row, rows: Sequence[Row], speed: str) -> str:
    """Name the fastest configuration with its speed, and those that may be as fast."""
    name = short_name(best, rows)
    to_reach = "" if best.goal.target is None else f" to reach {best.goal.target}"
    if not verdict.not_separated:
        return f"{name} is {'the ' if to_reach else ''}fastest{to_reach}{speed}."
    named = _named(verdict.not_separated, rows)
    if set(verdict.ties) == set(verdict.not_separated):
        share = f"{100 * verdict.margin:g} %"
        return f"Tie: {name}{speed}; less than {share} ahead of {named}{to_reach}."
    was = f"{name} was the fastest{to_reach}{speed}"
    return f"{was}, but it is not separated from {named}: the difference may be chance."


def _named(others: Sequence[str], rows: Sequence[Row]) -> str:
    """Name configurations; those without a row that is shown have their full names."""
    shown = {row.configuration: short_name(row, rows) for row in rows}
    return listed([shown.get(name, name) for name in others], _MOST_NAMED)


def _next(verdict: Verdict, best: Row, behind: Row, rows: Sequence[Row]) -> str:
    """Say by how much and why the first configuration that is slower is behind."""
    over = verdict.over_runner_up
    factor = "" if over is None else f"{over.estimate:.2f}{TIMES}"
    interval = "" if over is None else f" ({_interval(over)})"
    why = _why(best, behind, verdict.cause)
    return f"It is {factor} as fast as {short_name(behind, rows)}{interval}{why}."


def _power(verdict: Verdict, repeat: str | None) -> list[str]:
    """State the smallest difference that the run could show, and what would show more.

    repeat: the command that measures the further repeats.
    """
    words = []
    if verdict.detectable is not None and verdict.detectable > 1:
        words.append("This run could not even show a difference of a factor of two.")
    elif verdict.detectable is not None:
        words.append(
            f"This run could show differences of {100 * verdict.detectable:.2g} % or more."
        )
    further = verdict.further_repeats
    if further is not None:
        them = "it" if further == 1 else "them"
        how = "" if repeat is None else f"; `{repeat}` measures {them}"
        words.append(f"{_further_words(further).capitalize()}{how}.")
    return words


def _further_words(repeats: int) -> str:
    """Say how many further repeats are expected to decide."""
    if repeats > _MOST_FURTHER:
        return f"more than {_MOST_FURTHER} further repeats would be needed to decide"
    more = "1 more repeat is" if repeats == 1 else f"{repeats} more repeats are"
    return f"about {more} expected to decide"


def _baseline_words(rows: Sequence[Row], sequential: str | None) -> str:
    """Return "the baseline", with its name if it is not the sequential one."""
    row = next((row for row in rows if row.is_baseline), None)
    if row is None or row.configuration == sequential:
        return "the baseline"
    return f"the baseline {short_name(row, rows)}"


def _throughput_words(rows: Sequence[Row], behind: Row | None) -> list[str]:
    """Say which configuration has a higher throughput than the first to reach the target."""
    known = [
        r
        for r in rows
        if r.speed.samples_per_s is not None and r.equivalence.equivalent is not False
    ]
    if rows[0].goal.target is None or not known:
        return []
    highest = max(
        known, key=lambda row: row.speed.samples_per_s.estimate if row.speed.samples_per_s else 0.0
    )
    if highest.goal.steps_to_target == rows[0].goal.steps_to_target:
        return []
    name, own = short_name(highest, rows), f"{rows[0].goal.steps_to_target:g}"
    if highest.goal.time_to_target_s is None:
        return [f"{name} has the highest throughput, but missed the target."]
    if highest is behind:
        return ["The latter has the highest throughput."]
    steps = f"{highest.goal.steps_to_target:g} steps to the target instead of {own}"
    return [f"{name} has the highest throughput, but needs {steps}."]


def _speed(best: Row, baseline: str) -> str:
    """Return the time to the target, if there is one, and the speedup of the best row."""
    speedup, time = best.speed.speedup, ""
    if best.goal.time_to_target_s is not None:
        speedup, time = (
            best.goal.target_speedup,
            f" in {milliseconds(best.goal.time_to_target_s.estimate)}",
        )
    if best.is_baseline:
        return f"{time} (the baseline)"
    if speedup is None:
        return time
    return f"{time}, {speedup.estimate:.2f}{TIMES} as fast as {baseline} ({_interval(speedup)})"


def _interval(ratio: Interval) -> str:
    return bounds(ratio) if ratio.is_known else f"interval {NOT_KNOWN}"


def _why(best: Row, behind: Row, cause: MainPart | None) -> str:
    if best.goal.steps_to_target != behind.goal.steps_to_target:
        return (
            f", with {best.goal.steps_to_target:g} steps to the target instead of "
            f"{behind.goal.steps_to_target:g}"
        )
    if cause is not None:
        spent = f"{milliseconds(cause.faster_s)} instead of {milliseconds(cause.slower_s)} per step"
        part = PART_LABELS[cause.phase]
        if cause.label is None:
            return f", mainly in {part}: {spent}"
        where = "" if cause.label == part else f"{part}: "
        return f", mainly because of {cause.label} ({where}{spent})"
    measured = all(row.times.step_phases_s.get("forward") is not None for row in (best, behind))
    return "; the difference is spread over several parts" if measured else ""


def next_commands(comparison: Comparison, run_dir: Path, *, is_shipped: bool) -> list[NextCommand]:
    """Return at most two commands, the most useful first; none if nothing is ranked.

    is_shipped: the spec is one of Paceline's own.
    """
    ranked = [row for row in comparison.rows if row.ranked]
    if not ranked:
        return []
    run = shlex.quote(str(run_dir))
    found: list[NextCommand] = []
    wanted = [_repeats_that_help(comparison, workload) for workload in comparison.workloads]
    if any(wanted):
        command = _command_to_repeat(run, max(number or 0 for number in wanted))
        found.append((command, "To measure more repeats, which may decide"))
    if any(len(comparison.trials[row.configuration]) > 1 for row in ranked) and len(ranked) > 1:
        found.append((f"paceline explain {run}", "To see why the others are slower"))
    if is_shipped:
        found.append(("paceline init my.toml", "To begin a spec for your own model and data"))
    return found[:_MOST_COMMANDS]


def _command_to_repeat(run: str, repeats: int) -> str:
    return f"paceline run --resume {run} --repeats {repeats}"


def _repeats_that_help(comparison: Comparison, workload: str) -> int | None:
    """Return how many repeats in all are expected to decide; a few while the noise is unknown.

    None if more would not help, if too many would be needed, or if the run has no spec to repeat.
    """
    verdict = comparison.verdicts[workload]
    ranked = [row for row in comparison.rows_of(workload) if row.ranked]
    has = 1 + max(
        (t.record.trial.planned_repeat for own in comparison.trials.values() for t in own),
        default=0,
    )
    if "spec_toml" not in comparison.manifest:
        return None
    if not verdict.has_noise:
        return max(_FEW, has + 1) if len(ranked) > 1 else None
    further = verdict.further_repeats
    if further is None or further > _MOST_FURTHER or has + further > _MOST:
        return None
    return has + further
