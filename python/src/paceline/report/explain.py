"""`paceline explain` for the terminal, which fits 80 columns, and its section of the report."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paceline.analysis.explain.evidence import amount
from paceline.analysis.explain.explanation import OUTSIDE
from paceline.analysis.explain.run import explain_workload
from paceline.analysis.labels import short_name
from paceline.analysis.statistics import Mean
from paceline.records.phases import LABELS
from paceline.report.figures import waterfall_chart
from paceline.report.wording import NOT_MEASURED, listed, milliseconds, number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from paceline.analysis.comparison import Comparison
    from paceline.analysis.explain.causes import Cause
    from paceline.analysis.explain.explanation import Explanation
    from paceline.analysis.explain.interventions import Intervention, Verification
    from paceline.report.figures import Chart

    Name = Callable[[str], str]

_SUMS = (
    "Parts are means over steps, repeats and ranks; they add up to the difference. Causes can "
    "exceed 100 % where other parts are faster."
)
_MOST_EXPLAINED = 8  # pairs of a workload in the report; the command explains all
_LEAST_S = 5e-6  # parts that are smaller on both sides are not shown


def explanation_view(explanation: Explanation, name: Name) -> RenderableType:
    """Show one pair: the sentence, the parts, the causes, and the evidence.

    name: short name of a configuration or trial.
    """
    parts: list[RenderableType] = [
        Padding(Text(difference_sentence(explanation, name), style="bold"), (0, 0, 1, 0)),
        _part_table(explanation),
        Text(""),
    ]
    parts += [_cause_text(cause) for cause in explanation.causes]
    if not explanation.causes:
        parts.append(Text(no_cause_sentence(explanation)))
    if explanation.intervention is not None:
        parts += [Text(""), Text(intervention_sentence(explanation.intervention))]
    parts += [Text(""), _evidence_table(explanation), Text("")]
    parts += [Text(line, style="dim") for line in remarks(explanation)]
    return Group(*parts)


def overview(explanations: Sequence[Explanation], reference: str, name: Name) -> RenderableType:
    """Show one line for each configuration that is compared with `reference`.

    The reference has the best median. In a tie another configuration may have the shorter mean.
    """
    rows = [
        (name(each.slower if each.faster == reference else each.faster), each.faster == reference)
        for each in explanations
    ]
    heading = Text(f"Steps compared with those of {name(reference)}", style="bold")
    return Group(Padding(heading, (0, 0, 1, 0)), overview_table(explanations, rows))


def overview_table(
    explanations: Sequence[Explanation], rows: Sequence[tuple[str, bool]]
) -> RenderableType:
    """Show one line for each explanation.

    rows: what the line is called, and whether it is about the slower side; otherwise the signs
    change.
    """
    table = _table("configuration", "ms more\na step", "interval", "main cause", "share")
    for each, (called, is_slower) in zip(explanations, rows, strict=True):
        whole = each.difference.difference_s
        if not is_slower:
            whole = Mean(mean=-whole.mean, low=-whole.high, high=-whole.low)
        share, label = NOT_MEASURED, "not significant"
        if each.causes:
            share, label = f"{100 * each.causes[0].share:.0f} %", each.causes[0].label
        elif each.difference.is_significant:
            label = "spread over several parts"
        table.add_row(called, number(1000 * whole.mean), bounds_ms(whole), label, share)
    return table


def difference_sentence(explanation: Explanation, name: Name) -> str:
    """Say by how much one configuration is slower, and the causes."""
    found = explanation.difference
    whole = found.difference_s
    slower, faster = name(explanation.slower), name(explanation.faster)
    interval = f"95 % interval {bounds_ms(whole)} ms"
    if not found.is_significant:
        return (
            f"Not significant at 1 %: {slower} takes {milliseconds(whole.mean)} more per step "
            f"than {faster} ({interval})."
        )
    ratio = found.slower_s / found.faster_s
    words = (
        f"{slower} takes {milliseconds(whole.mean)} more per step than {faster} ({interval}), "
        f"{ratio:.2f} times as long."
    )
    named = [f"{c.label} {100 * c.share:.0f} %" for c in explanation.causes[:3]]
    return f"{words} Causes: {listed(named)}." if named else words


def no_cause_sentence(explanation: Explanation) -> str:
    if explanation.difference.is_significant:
        return "No single part is significantly slower, so no cause is named."
    return "No cause is named, because the difference may be chance."


def intervention_sentence(found: Intervention) -> str:
    """Say which change can decide a cause."""
    return (
        f"To verify {found.cause_label!r}: {found.label}. If it is the cause, a step becomes about "
        f"{milliseconds(found.expected_s)} shorter. `paceline explain … --verify` runs this test."
    )


def verification_sentence(found: Verification) -> str:
    """Say what an intervention showed."""
    saved = f"{milliseconds(found.saved_s.mean)} (95 % interval {bounds_ms(found.saved_s)} ms)"
    words = {
        "confirmed": "the cause is confirmed",
        "refuted": "the cause is refuted: removing it saves less than half of that",
        "undecided": "not decided: repeat it with a longer --limit",
        "gone": "not decided: the unchanged configuration is no longer slow, so the cause has gone",
    }
    return (
        f"{found.intervention}: a step takes {milliseconds(found.changed_s)} instead of "
        f"{milliseconds(found.unchanged_s)}, over {found.repeats} repeats in turn. It saves "
        f"{saved}; expected {milliseconds(found.expected_s)}. Result for {found.cause}: "
        f"{words[found.answer]}."
    )


def remarks(explanation: Explanation) -> list[str]:
    """Return how to read the figures."""
    found = explanation.difference
    lines = [_SUMS]
    if explanation.without_straggler:
        lines.append(
            "The rank with the largest delay is left out of the means, so that waiting shows its "
            "cost."
        )
    if found.repeats == 1:
        lines.append("One common repeat: intervals cover the steps, not the run-to-run noise.")
    elif found.repeats == 0:
        lines.append("No common repeat: drifts of the machine do not cancel.")
    lines.append(f"Hardware counters: {explanation.hardware_counters}.")
    outside = [
        f"{LABELS[row.phase]} {number(row.slower_s)} s instead of {number(row.faster_s)} s"
        for row in explanation.outside_steps
        if row.phase in OUTSIDE and row.faster_s is not None and row.slower_s is not None
    ]
    if outside:
        lines.append(f"Outside of the steps, per trial: {'; '.join(outside)}.")
    return lines


def bounds_ms(interval: Mean) -> str:
    return f"{number(1000 * interval.low)} to {number(1000 * interval.high)}"


def explanations(comparison: Comparison, add: Callable[[Chart], str]) -> list[dict[str, Any]]:
    """Return the differences of each workload from its fastest configuration, for the template.

    At most _MOST_EXPLAINED are shown; the first significant one has a figure.
    """
    name = name_in(comparison)
    found = []
    for workload in comparison.workloads:
        all_found = explain_workload(comparison, workload, _MOST_EXPLAINED)
        drawn = next((each for each in all_found if each.difference.is_significant), None)
        if all_found:
            figure = None
            if drawn is not None:
                figure = add(waterfall_chart(drawn, name(drawn.faster), name(drawn.slower)))
            pairs = [_section(each, name) for each in all_found]
            found.append({"name": workload, "figure": figure, "pairs": pairs})
    return found


def name_in(comparison: Comparison) -> Name:
    """Return the function that gives a configuration its short name; a trial keeps its id."""
    return partial(_name_in, comparison)


def _name_in(comparison: Comparison, name: str) -> str:
    rows = comparison.rows
    return next((short_name(row, rows) for row in rows if row.configuration == name), name)


def _section(explanation: Explanation, name: Name) -> dict[str, Any]:
    found = explanation.difference
    return {
        "sentence": difference_sentence(explanation, name),
        "parts": [
            {
                "label": part.label,
                "faster_ms": 1000 * part.faster_s,
                "slower_ms": 1000 * part.slower_s,
                "difference_ms": 1000 * part.difference_s.mean,
                "bounds": bounds_ms(part.difference_s),
                "share": None if part.share is None else 100 * part.share,
            }
            for part in found.parts
            if max(part.faster_s, part.slower_s) >= _LEAST_S
        ],
        "causes": [
            {"label": c.label, "share": 100 * c.share, "evidence": "; ".join(c.evidence)}
            for c in explanation.causes
        ],
        "no_cause": None if explanation.causes else no_cause_sentence(explanation),
        "intervention": explanation.intervention
        and intervention_sentence(explanation.intervention),
    }


def _part_table(explanation: Explanation) -> Table:
    table = _table("part of a step, ms", "faster", "slower", "more", "95 % interval", "share")
    for part in explanation.difference.parts:
        if max(part.faster_s, part.slower_s) < _LEAST_S:
            continue
        table.add_row(
            part.label,
            number(1000 * part.faster_s),
            number(1000 * part.slower_s),
            number(1000 * part.difference_s.mean),
            bounds_ms(part.difference_s),
            NOT_MEASURED if part.share is None else f"{100 * part.share:.0f} %",
        )
    found = explanation.difference
    whole = found.difference_s
    table.add_row(
        "whole step",
        number(1000 * found.faster_s),
        number(1000 * found.slower_s),
        number(1000 * whole.mean),
        bounds_ms(whole),
        "100 %" if found.is_significant else NOT_MEASURED,
        style="bold",
    )
    return table


def _cause_text(cause: Cause) -> RenderableType:
    heading = f"{cause.label}: {milliseconds(cause.difference_s)}, {100 * cause.share:.0f} %"
    lines = Text("\n".join(cause.evidence), style="" if cause.has_evidence else "dim")
    return Group(Text(heading, style="bold"), Padding(lines, (0, 0, 0, 2)))


def _evidence_table(explanation: Explanation) -> Table:
    table = _table("evidence while training", "faster", "slower")
    for factor in explanation.factors:
        cells = [amount(value, factor.unit) for value in (factor.faster, factor.slower)]
        table.add_row(factor.label, *cells)
    for row in explanation.evidence:
        if row.faster is not None or row.slower is not None:
            cells = [amount(value, row.unit) for value in (row.faster, row.slower)]
            table.add_row(row.label, *cells)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for number_, column in enumerate(columns):
        is_text = number_ == 0 or column == "main cause"
        table.add_column(
            column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold"
        )
    return table
