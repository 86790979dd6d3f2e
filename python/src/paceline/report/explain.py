"""`paceline explain` for the terminal, which fits 80 columns, and its section of the page."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paceline.analysis.compare.explain_run import explain_workload
from paceline.analysis.explain.evidence import amount
from paceline.analysis.explain.explanation import OUTSIDE
from paceline.analysis.statistics.intervals import Mean
from paceline.records.phases import LABELS
from paceline.report.section import Column, Section, Table, terminal_view
from paceline.report.sections import name_in as short_name_in
from paceline.report.wording import (
    NOT_MEASURED,
    bounds_ms,
    in_milliseconds,
    listed,
    milliseconds,
    number,
    share,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from paceline.analysis.compare.result import Comparison
    from paceline.analysis.explain.explanation import EvidenceRow, Explanation
    from paceline.analysis.explain.interventions import Intervention, Verification
    from paceline.analysis.explain.pair import Factor

    Name = Callable[[str], str]
    Overviewed = tuple[str, Explanation, bool]  # a name; whether it is that of the slower side
    PartLine = tuple[
        str, float, float, Mean, str
    ]  # label, seconds of both sides, difference, share
    EvidenceLine = tuple[str, str, str]

_SUMS = (
    "Parts are means over steps, repeats and ranks; they add up to the difference. Causes can "
    "exceed 100 % where other parts are faster."
)
_WHOLE = "whole step"
_MOST_EXPLAINED = 8  # pairs of a workload in the report; the command explains all
_LEAST_S = 5e-6  # parts that are smaller on both sides are not shown


def explanation_view(explanation: Explanation, name: Name) -> RenderableType:
    """Show one pair: the sentence, the parts, the causes, and the evidence.

    name: short name of a configuration or trial.
    """
    sentence = Section(title=difference_sentence(explanation, name))
    return terminal_view(Section(parts=(sentence, *_pair_parts(explanation))))


def overview(explanations: Sequence[Explanation], reference: str, name: Name) -> RenderableType:
    """Show one line for each configuration that is compared with `reference`.

    The reference has the best speed. Where they are not separated, another may have shorter steps.
    """
    lines = [
        (
            name(each.slower if each.faster == reference else each.faster),
            each,
            each.faster == reference,
        )
        for each in explanations
    ]
    heading = f"Steps compared with those of {name(reference)}"
    return terminal_view(Section(title=heading, table=overview_table(lines)))


def overview_table(lines: Sequence[Overviewed]) -> Table[Overviewed]:
    """Return one line for each explanation.

    Where a line is about the faster side, the signs change.
    """
    columns: list[Column[Overviewed]] = [
        Column("configuration", lambda line: line[0], "text"),
        Column("ms more\na step", lambda line: in_milliseconds(_whole(line).mean)),
        Column("interval", lambda line: bounds_ms(_whole(line))),
        Column("main cause", lambda line: _main_cause(line[1]), "text"),
        Column("share", lambda line: share(line[1].causes[0].share if line[1].causes else None)),
    ]
    return Table(columns=columns, items=lines)


def causes_section(comparison: Comparison) -> Section | None:
    """Explain the differences from the fastest configuration; None if there are none.

    At most _MOST_EXPLAINED are shown; the first significant one has a figure.
    """
    from paceline.report.figures.bars import waterfall_chart  # noqa: PLC0415  (page only)

    name = name_in(comparison)
    parts = []
    for workload in comparison.workloads:
        found = explain_workload(comparison, workload, _MOST_EXPLAINED)
        drawn = [each for each in found if each.difference.is_significant][:1]
        charts = [waterfall_chart(each, name(each.faster), name(each.slower)) for each in drawn]
        pairs = [
            Section(folded=difference_sentence(each, name), parts=_pair_parts(each))
            for each in found
        ]
        if pairs:
            parts.append(Section(title=workload, charts=charts, parts=pairs))
    if not parts:
        return None
    return Section(
        title="Causes of the differences",
        anchor="causes",
        intro=(
            "The difference in the mean step between the fastest configuration and up to eight "
            "other ranked ones, split into parts that add up to it. A part without evidence in "
            "the hosts' traces is named, too, and says so. paceline explain shows any pair."
        ),
        parts=parts,
    )


def name_in(comparison: Comparison) -> Name:
    """Return the function that gives a configuration its short name; a trial keeps its id."""
    return partial(short_name_in, comparison)


def _whole(line: Overviewed) -> Mean:
    _, explanation, is_slower = line
    whole = explanation.difference.difference_s
    return whole if is_slower else Mean(mean=-whole.mean, low=-whole.high, high=-whole.low)


def _main_cause(explanation: Explanation) -> str:
    if explanation.causes:
        return explanation.causes[0].label
    if explanation.difference.is_significant:
        return "spread over several parts"
    return "not significant"


def _pair_parts(explanation: Explanation) -> list[Section]:
    """Return parts of the step, causes, intervention and evidence of one pair."""
    parts = [Section(table=_part_table(explanation))]
    parts += [
        Section(
            title=f"{cause.label}: {milliseconds(cause.difference_s)}, {share(cause.share)}",
            sentences=cause.evidence,
        )
        for cause in explanation.causes
    ]
    if not explanation.causes:
        parts.append(Section(sentences=(no_cause_sentence(explanation),)))
    if explanation.intervention is not None:
        parts.append(Section(sentences=(intervention_sentence(explanation.intervention),)))
    parts.append(Section(table=_evidence_table(explanation), notes=remarks(explanation)))
    return parts


def _part_table(explanation: Explanation) -> Table[PartLine]:
    found = explanation.difference
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
        Column("95 % interval", lambda line: bounds_ms(line[3])),
        Column("share", lambda line: line[4]),
    ]
    return Table(
        columns=columns, items=lines, style=lambda line: "sum" if line[0] == _WHOLE else ""
    )


def _evidence_table(explanation: Explanation) -> Table[EvidenceLine]:
    known = [e for e in explanation.evidence if e.faster is not None or e.slower is not None]
    figures: list[Factor | EvidenceRow] = [*explanation.factors, *known]
    columns: list[Column[EvidenceLine]] = [
        Column("evidence while training", lambda line: line[0], "text"),
        Column("faster", lambda line: line[1]),
        Column("slower", lambda line: line[2]),
    ]
    lines = [(f.label, amount(f.faster, f.unit), amount(f.slower, f.unit)) for f in figures]
    return Table(columns=columns, items=lines)


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
