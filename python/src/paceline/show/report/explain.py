"""`paceline explain` for the terminal, which fits 80 columns, and its section of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from rich.console import RenderableType
from rich.text import Text

from paceline.analysis.between_runs.two_runs import ExplainedRuns, side_name
from paceline.analysis.compare.run import Comparison, explain_workload
from paceline.analysis.explain.evidence import HARDWARE_COUNTERS, ON_CORES, PART_LABELS, amount
from paceline.analysis.explain.explanation import CAUSE_BOUNDS, SPREAD, Cause, Explanation
from paceline.analysis.statistics.intervals import Mean
from paceline.analysis.trial.load import LoadOfRun
from paceline.measure.records.phases import LABELS
from paceline.plan.trials.trial import Trial
from paceline.show.report.runs import configuration_names, differences_view
from paceline.show.report.section import Column, Section, Table, spaced, terminal_view
from paceline.show.report.sections import name_in as short_name_in
from paceline.show.report.sections import of_workloads
from paceline.show.report.wording import (
    NOT_KNOWN,
    NOT_MEASURED,
    beside_load,
    bounds_ms,
    in_milliseconds,
    in_workload,
    listed,
    load_clause,
    milliseconds,
    number,
    share,
)

Name = Callable[[str], str]
Overviewed = tuple[str, Explanation, bool]  # a name; whether it is that of the slower side
# label, seconds of both sides, difference, share
PartLine = tuple[str, float, float, Mean, str]
EvidenceLine = tuple[str, str, str]

_SUMS = (
    "Parts are means over steps, repeats and ranks; they add up to the difference. Times of causes "
    f"are {CAUSE_BOUNDS}. Their shares are those of the time by which parts became longer."
)
_STATE = (
    "Repeats of different runs are not paired, so drifts of the machine do not cancel. A "
    "difference between two runs may come from the state of the machine at that time."
)
_MANY = "Among so many comparisons, a difference may be chance although its interval excludes 0."
_BOUNDS = f"Shares of causes are {CAUSE_BOUNDS}."
_OTHER_CAUSE = "Where a step is shorter, the cause belongs to the one that it is compared with."
_WHOLE = "whole step"
_MOST_EXPLAINED = 8  # pairs of a workload in the report; the command explains all
_LEAST_S = 5e-6  # parts that are smaller on both sides are not shown
_LEAST_UNEXPLAINED = 0.005  # of the difference: less is rounding
_PLACES = PART_LABELS | {
    ON_CORES: "time on cores (computation, optimiser, other)",
    SPREAD: "several parts, none of them significantly longer",
}


def explanation_view(explanation: Explanation, sentence: str) -> RenderableType:
    """Show one pair: its sentence, the parts, the causes, and the evidence."""
    return terminal_view(Section(parts=(Section(title=sentence), *_pair_parts(explanation))))


def pair_view(comparison: Comparison, explanation: Explanation) -> RenderableType:
    """Show one pair of a run."""
    sentence = _sentence_of(comparison, explanation)
    workload = comparison.row(explanation.faster).workload
    return explanation_view(explanation, in_workload(comparison, workload, sentence))


def _sentence_of(comparison: Comparison, explanation: Explanation) -> str:
    load = comparison.load_of((explanation.faster, explanation.slower))
    return difference_sentence(explanation, name_in(comparison), load)


def overview(
    comparison: Comparison, explanations: Sequence[Explanation], reference: str
) -> RenderableType:
    """Show one line for each configuration of a workload that is compared with `reference`.

    The reference has the best speed. Where they are not separated, another may have shorter steps.
    """
    name = name_in(comparison)
    lines = [
        (
            name(each.slower if each.faster == reference else each.faster),
            each,
            each.faster == reference,
        )
        for each in explanations
    ]
    load = comparison.load_of(dict.fromkeys(n for e in explanations for n in (e.faster, e.slower)))
    heading = f"Steps compared with those of {name(reference)}{load_clause(load)}"
    workload = comparison.row(reference).workload
    return terminal_view(_overview(in_workload(comparison, workload, heading), lines))


def explained_runs_view(
    found: ExplainedRuns, labels: tuple[str, str], trials: Iterable[Trial], load: str = ""
) -> RenderableType:
    """Show what differs between two runs, then one pair in detail or a line for each.

    labels: names of the runs. trials: one of each configuration. load: words of `loaded_runs`.
    """
    short = configuration_names(trials)
    names = {
        side_name(name, label): f"{called} in {label}"
        for name, called in short.items()
        for label in labels
    }
    blocks: list[RenderableType] = differences_view(found.differences)
    if len(found.explanations) == 1:
        (only,) = found.explanations
        sentence = difference_sentence(only, lambda name: names.get(name, name), about_runs=load)
        blocks.append(explanation_view(only, sentence))
    else:
        seconds = {side_name(name, labels[1]): called for name, called in short.items()}
        lines = [
            (seconds.get(each.slower) or seconds[each.faster], each, each.slower in seconds)
            for each in found.explanations
        ]
        heading = f"Steps in {labels[1]} compared with those in {labels[0]}{load}"
        blocks.append(terminal_view(_overview(heading, lines)))
    blocks += [Text(f"not compared: {each}") for each in found.not_compared]
    return spaced([*blocks, Text(_STATE, style="dim")])


def causes_section(comparison: Comparison) -> Section | None:
    """Explain the differences from the fastest configuration; None if there are none.

    At most _MOST_EXPLAINED are shown; the first significant one has a figure.
    """
    return of_workloads(
        comparison,
        _causes_part,
        title="Causes of the differences",
        anchor="causes",
        intro=(
            "The difference in the mean step between the fastest configuration and up to eight "
            "other ranked ones, split into parts that add up to it. A cause has the most time that "
            "its evidence can explain; these bounds may overlap. paceline explain shows any pair."
        ),
    )


def _causes_part(comparison: Comparison, workload: str) -> Section | None:
    from paceline.show.report.figures.charts import waterfall_chart  # noqa: PLC0415  (page only)

    name = name_in(comparison)
    found = explain_workload(comparison, workload, _MOST_EXPLAINED)
    if not found:
        return None
    drawn = [each for each in found if each.is_significant][:1]
    charts = [
        waterfall_chart(each, workload, name(each.faster), name(each.slower)) for each in drawn
    ]
    pairs = [
        Section(title=_sentence_of(comparison, each), folded=True, parts=_pair_parts(each))
        for each in found
    ]
    return Section(title=workload, charts=charts, parts=pairs)


def name_in(comparison: Comparison) -> Name:
    """Return the function that gives a configuration its short name."""
    return partial(short_name_in, comparison)


def _overview(heading: str, lines: Sequence[Overviewed]) -> Section:
    """Return one line for each explanation.

    Where a line is about the faster side, the signs change.
    """
    columns: list[Column[Overviewed]] = [
        Column("configuration", lambda line: line[0], "text"),
        Column("ms more\na step", lambda line: in_milliseconds(_whole(line).mean)),
        Column("interval", lambda line: _bounds(_whole(line))),
        Column("main cause", lambda line: _main_cause(line[1])[0], "text"),
        Column("share", lambda line: share(_main_cause(line[1])[1])),
    ]
    notes = [_BOUNDS] if any(found.causes for _, found, _ in lines) else []
    is_reversed = any(each.causes and not is_slower for _, each, is_slower in lines)
    notes += [_OTHER_CAUSE] if is_reversed else []
    notes += [_MANY] if any(_is_one_of_many(found) for _, found, _ in lines) else []
    return Section(title=heading, table=Table(columns=columns, items=lines), notes=notes)


def _is_one_of_many(found: Explanation) -> bool:
    """Tell whether only the test of all configurations together does not separate the pair."""
    return not found.is_significant and found.difference_s.low > 0


def _whole(line: Overviewed) -> Mean:
    _, explanation, is_slower = line
    whole = explanation.difference_s
    return whole if is_slower else Mean(mean=-whole.mean, low=-whole.high, high=-whole.low)


def _bounds(interval: Mean) -> str:
    """Format the bounds in milliseconds; with one repeat there are none."""
    return NOT_KNOWN if math.isinf(interval.high) else bounds_ms(interval)


def _main_cause(explanation: Explanation) -> tuple[str, float | None]:
    """Return the label and the share of the main cause."""
    main, rest = explanation.main_cause, explanation.unexplained
    if main is not None:
        return main.label, main.share
    return ("undecided", None) if rest is None else ("unexplained", rest.share)


def _pair_parts(explanation: Explanation) -> list[Section]:
    """Return parts of the step, causes and evidence of one pair."""
    parts = [Section(table=_part_table(explanation))]
    parts += [
        Section(title=_cause_title(cause), sentences=cause.evidence) for cause in explanation.causes
    ]
    rest = explanation.unexplained
    if rest is None:
        sentence = "No cause is named, because the difference may be chance."
        parts.append(Section(sentences=(sentence,)))
    elif rest.share >= _LEAST_UNEXPLAINED:
        places = [_PLACES[part] for part in rest.parts]
        sentences = (f"in: {listed(places)}",) if places else ()
        title = f"unexplained: at least {milliseconds(rest.at_least_s)}, {share(rest.share)}"
        parts.append(Section(title=title, sentences=sentences))
    parts.append(Section(table=_evidence_table(explanation), notes=_remarks(explanation)))
    return parts


def _cause_title(cause: Cause) -> str:
    return f"{cause.label}: at most {milliseconds(cause.at_most_s)}, {share(cause.share)}"


def _part_table(found: Explanation) -> Table[PartLine]:
    lines: list[PartLine] = [
        (part.label, part.faster_s, part.slower_s, part.difference_s, share(part.share))
        for part in found.parts
        if max(part.faster_s, part.slower_s) >= _LEAST_S
    ]
    whole = share(1.0) if found.is_significant else NOT_MEASURED
    lines.append((_WHOLE, found.faster_s, found.slower_s, found.difference_s, whole))
    columns: list[Column[PartLine]] = [
        Column("part of a step, ms", lambda line: line[0], "text"),
        Column("faster", lambda line: in_milliseconds(line[1])),
        Column("slower", lambda line: in_milliseconds(line[2])),
        Column("more", lambda line: in_milliseconds(line[3].mean)),
        Column("95 % interval", lambda line: _bounds(line[3])),
        Column("share", lambda line: line[4]),
    ]
    return Table(
        columns=columns, items=lines, style=lambda line: "sum" if line[0] == _WHOLE else ""
    )


def _evidence_table(explanation: Explanation) -> Table[EvidenceLine]:
    figures = [(f.label, f.unit, f.faster, f.slower) for f in explanation.factors]
    figures += [
        (row["label"], row["unit"], row["faster"], row["slower"])
        for row in explanation.evidence
        if row["faster"] is not None or row["slower"] is not None
    ]
    columns: list[Column[EvidenceLine]] = [
        Column("evidence while training", lambda line: line[0], "text"),
        Column("faster", lambda line: line[1]),
        Column("slower", lambda line: line[2]),
    ]
    lines = [(label, amount(a, unit), amount(b, unit)) for label, unit, a, b in figures]
    return Table(columns=columns, items=lines)


def difference_sentence(
    found: Explanation, name: Name, load: LoadOfRun | None = None, about_runs: str = ""
) -> str:
    """Say by how much one configuration is slower, and the causes.

    load: of the trials of both. about_runs: words of `loaded_runs`.
    """
    slower, faster = name(found.slower), name(found.faster)
    more, interval = milliseconds(found.difference_s.mean), _bounds(found.difference_s)
    unit = "" if interval == NOT_KNOWN else " ms"
    takes = f"{slower} takes {more} more per step than {faster} (95 % interval {interval}{unit})"
    if found.is_significant:
        words = f"{takes}, {found.slower_s / found.faster_s:.2f} times as long{about_runs}."
    else:
        words = f"Undecided: {takes}{about_runs}."
    words = words if load is None else beside_load(words, load)
    if not found.is_significant:
        return f"{words} {_MANY}" if _is_one_of_many(found) else words
    if not found.causes:
        return f"{words} No evidence explains it."
    named = listed([f"{cause.label} at most {share(cause.share)}" for cause in found.causes[:3]])
    rest = found.unexplained
    if rest is None or rest.share < _LEAST_UNEXPLAINED:
        return f"{words} Causes: {named}."
    return f"{words} Causes: {named}; at least {share(rest.share)} is unexplained."


def _remarks(found: Explanation) -> list[str]:
    """Return how to read the figures."""
    lines = [_SUMS]
    if found.without_straggler:
        lines.append(
            "The rank with the largest delay is left out of the means, so that waiting shows its "
            "cost."
        )
    if found.repeats == 0:
        lines.append("No common repeat: drifts of the machine do not cancel.")
    lines.append(f"Hardware counters: {HARDWARE_COUNTERS}.")
    outside = [
        f"{LABELS[row['phase']]} {number(row['slower_s'])} s instead of {number(row['faster_s'])} s"
        for row in found.outside_steps
        if row["faster_s"] is not None and row["slower_s"] is not None
    ]
    if outside:
        lines.append(f"Outside of the steps, per trial: {'; '.join(outside)}.")
    return lines
