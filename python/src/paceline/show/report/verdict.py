"""The verdict on a workload as a sentence, its document, and the commands that may follow."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.analysis.compare.row import Row, plain_name
from paceline.analysis.compare.run import Comparison
from paceline.analysis.compare.verdict import LauncherEffect, MainPart, Verdict
from paceline.analysis.explain.evidence import PART_LABELS
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.trial.reading import TIMES
from paceline.show.report.wording import (
    NO_STEP,
    beside_load,
    bounds_in_words,
    listed,
    milliseconds,
    number_word,
    percent,
)

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
    words = _verdict_words(comparison, workload)
    load = comparison.load_of(row.configuration for row in comparison.rows_of(workload))
    return " ".join([beside_load(words[0], load), *words[1:]])


def _verdict_words(comparison: Comparison, workload: str) -> list[str]:
    """Return the sentences of the verdict; the first one is the answer."""
    verdict, rows = comparison.verdicts[workload], comparison.rows_of(workload)
    ranked = [row for row in rows if row.ranked]
    baseline = _baseline_words(rows)
    if not ranked:
        target = next((row.goal.target for row in rows if row.goal.target is not None), None)
        missed = None if target is None else f"none reached the target ({target})"
        has_steps = any(row.speed.step_s is not None for row in rows)
        unknown = "none was shown to be equivalent to the baseline" if has_steps else NO_STEP
        return [f"No configuration is ranked, because {verdict.no_baseline or missed or unknown}."]
    shown = {row.configuration: row for row in rows}
    best, behind = shown.get(verdict.best or ""), shown.get(verdict.runner_up or "")
    others = {*verdict.not_separated, verdict.runner_up} - {None, ranked[0].configuration}
    if verdict.best is not None and best is None:
        return [f"The fastest configuration, {verdict.best}, is not among the rows shown."]
    repeats = _repeats_that_help(comparison, workload)
    repeat = None if repeats is None else _command_to_repeat("RUN_DIR", repeats)
    if len(ranked) == 1 and not others:
        words = _single(ranked[0], rows, baseline)
    elif best is None:
        words = _without_noise(ranked[0], rows, baseline)
        words += [] if repeat is None else [f"`{repeat}` measures more."]
    else:
        words = _first(verdict, best, rows, baseline)
        if verdict.launchers is not None:
            words += _launcher_words(verdict.launchers, best, shown)
        if behind is not None and verdict.over_runner_up is not None:
            words.append(_next(verdict.over_runner_up, best, behind, rows, verdict.cause))
    if verdict.other_launcher_and_transport and best is not None:
        named = _named(verdict.other_launcher_and_transport, rows)
        own = plain_name(best, rows)
        words.append(f"Launcher and transport of {own} both differ from those of {named}.")
    words += _throughput_words(rows, behind)
    words += _power(verdict, repeat)
    if len(ranked) > 1 and any(row.is_unchecked_script for row in rows):
        words.append("Not all of them were checked for equivalence (see eq. ?).")
    return words


def _single(only: Row, rows: Sequence[Row], baseline: str) -> list[str]:
    """Say that there is nothing to compare the only ranked configuration with."""
    name = plain_name(only, rows)
    if len([row for row in rows if not row.failed]) == 1:
        return [f"Only one configuration, {name}, was measured, so there is nothing to compare."]
    if any(row.equivalence.other_rows for row in rows):
        return [f"Only one configuration, {name}, is ranked: the others step over other samples."]
    if only.goal.time_to_target_s is None:
        return [f"Only one configuration, {name}, is ranked: no other was shown to be equivalent."]
    return [f"Only one configuration, {name}, reached {only.goal.target}{_speed(only, baseline)}."]


def _without_noise(first: Row, rows: Sequence[Row], baseline: str) -> list[str]:
    """Say why a run with one repeat has no verdict."""
    chance = "with one repeat the run-to-run noise is unknown, so differences may be chance"
    return [f"No verdict: {chance}.", f"Ahead is {_lead(first, rows, baseline)}."]


def _first(verdict: Verdict, best: Row, rows: Sequence[Row], baseline: str) -> list[str]:
    """Name the fastest configuration with its speed, and the group of those that may be as fast."""
    to_reach = "" if best.goal.target is None else f" to reach {best.goal.target}"
    lead, near = _lead(best, rows, baseline), verdict.not_separated
    if not near:
        return [f"The fastest{to_reach} is {lead}."]
    count = number_word(len(near) + 1)
    if set(verdict.ties) == set(near):
        margin = percent(verdict.margin)
        first = f"The fastest{to_reach} are {count} configurations within {margin}, led by {lead}."
    else:
        first = (
            f"Undecided which of {count} configurations is the fastest{to_reach}; ahead is {lead}."
        )
    if len(near) > _MOST_NAMED:
        return [first]  # the table marks them
    return [first, f"The other{'' if len(near) == 1 else 's'}: {_named(near, rows)}."]


def _lead(best: Row, rows: Sequence[Row], baseline: str) -> str:
    """Return the name of a configuration with its cores and its speed."""
    place, cores = best.placement, ""
    if place.device == "cpu":
        cores = f" on {number_word(place.cores, 'core')}"
        cores += f" of {number_word(place.nodes, 'node')}" if place.nodes > 1 else ""
    return f"{plain_name(best, rows)}{cores}{_speed(best, baseline)}"


def _named(others: Sequence[str], rows: Sequence[Row]) -> str:
    """Name configurations; those without a row that is shown have their full names."""
    shown = {row.configuration: plain_name(row, rows) for row in rows}
    return listed([shown.get(name, name) for name in others], _MOST_NAMED)


def _launcher_words(effect: LauncherEffect, best: Row, shown: Mapping[str, Row]) -> list[str]:
    """Say whether the launcher makes a difference where nothing else differs."""
    if not {effect.fastest, *effect.ratios} <= shown.keys():
        return []
    first = shown[effect.fastest]
    ratios = [
        f"{shown[name].setup.launcher} {bounds_in_words(ratio)}"
        for name, ratio in effect.ratios.items()
    ]
    what = f"{listed(ratios)} of {first.setup.launcher}"
    if best.configuration not in {effect.fastest, *effect.ratios}:
        what = f"{first.setup.local_strategy} over {first.setup.transport}: {what}"
    if effect.makes_difference is None:
        return [f"Whether the launcher makes a difference is undecided ({what})."]
    return [f"The launcher makes {'a' if effect.makes_difference else 'no'} difference ({what})."]


def _at_start(name: str) -> str:
    """Return a name as a sentence begins with it."""
    return f"{name[0].upper()}{name[1:]}"


def _next(
    over: Interval, best: Row, behind: Row, rows: Sequence[Row], cause: MainPart | None
) -> str:
    """Say by how much and why the first configuration that is slower is behind."""
    why = _why(best, behind, cause)
    name = plain_name(behind, rows)
    if behind.is_baseline and best.goal.target is None:  # the first sentence has the ratio
        return f"{_at_start(name)} is next{why}."
    figures = over if best.goal.target is not None else over.inverse()
    what = "speed" if best.goal.target is None else "time"
    ratio = f"{figures.estimate:.2f}{TIMES} the {what} of the first ({bounds_in_words(figures)})"
    return f"Next is {name} with {ratio}{why}."


def _power(verdict: Verdict, repeat: str | None) -> list[str]:
    """State the smallest difference that the run could show, and what would show more.

    repeat: the command that measures the further repeats.
    """
    words = []
    if verdict.detectable is not None and verdict.detectable > 1:
        words.append("This run could not even show a difference of a factor of two.")
    elif verdict.detectable is not None:
        words.append(f"This run could show differences of {percent(verdict.detectable)} or more.")
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


def _baseline_words(rows: Sequence[Row]) -> str:
    """Return the name of the baseline, for example `one process`."""
    row = next((row for row in rows if row.is_baseline), None)
    return "the baseline" if row is None else plain_name(row, rows)


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
    name, own = _at_start(plain_name(highest, rows)), f"{rows[0].goal.steps_to_target:g}"
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
    figure = f"{speedup.estimate:.2f}{TIMES}"
    if best.goal.time_to_target_s is not None:
        figure += " as fast as"
    return f"{time}, {figure} {baseline} ({bounds_in_words(speedup)})"


def _why(best: Row, behind: Row, cause: MainPart | None) -> str:
    """Say why the second configuration is slower; no words where that is not known."""
    if best.goal.steps_to_target != behind.goal.steps_to_target:
        steps = [f"{row.goal.steps_to_target:g}" for row in (behind, best)]
        return f": it takes {steps[0]} steps to the target instead of {steps[1]}"
    if cause is None:
        measured = all(row.times.step_phases_s.get("forward") is not None for row in (best, behind))
        return ": several parts of its step are longer" if measured else ""
    part = PART_LABELS[cause.phase]
    spent = f"{milliseconds(cause.slower_s)} a step instead of {milliseconds(cause.faster_s)}"
    if cause.label is None:
        return f", slower mainly in {part}: {spent}"
    where = "" if cause.label == part else f"{part} takes "
    return f", slower mainly because of {cause.label}: {where}{spent}"


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
