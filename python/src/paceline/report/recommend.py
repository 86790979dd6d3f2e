"""`paceline recommend` for the terminal, which fits 80 columns, and its sentences in the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType

from paceline.analysis.recommend import Candidate, NextMeasurement, Recommendation
from paceline.report.columns import NEAR_MARK
from paceline.report.section import Column, Section, Table, terminal_view
from paceline.report.verdict import MOST_NAMED, further_words
from paceline.report.wording import NOT_KNOWN, NOT_MEASURED, listed, number

_MOST_SHOWN = 12  # configurations of a kind; JSON has all


def recommendation_view(found: Recommendation, reasons: Mapping[str, str]) -> RenderableType:
    """Show the recommendation, then measured and predicted configurations apart.

    reasons: why a configuration is slower than the best one, by its name; others have their own.
    """
    parts = []
    if found.next_measurement is not None:
        parts.append(Section(sentences=(measurement_sentence(found.next_measurement),)))
    if found.measured:
        parts.append(Section(table=_table(f"measured, {found.unit}", found.measured, reasons)))
    if found.predicted:
        title = f"predicted, not measured, {found.unit}"
        parts.append(Section(table=_table(title, found.predicted, {})))
    if any(each.tied for each in found.measured):
        parts.append(Section(notes=(f"{NEAR_MARK} not separated from the best measured one",)))
    return terminal_view(Section(title=recommendation_sentence(found), parts=parts))


def recommendation_sentence(found: Recommendation) -> str:
    """Name the best measured configuration, those not separated from it, and a prediction."""
    if found.unavailable is not None or found.best is None:
        return f"{found.workload}: no recommendation: {found.unavailable}."
    best = found.best
    value = f"{number(best.value.median)} {found.unit}"
    among = f"of those measured on at most {_nodes(found.nodes)}"
    words = [f"{found.workload}: {best.name} needs the least {found.goal} {among} ({value})."]
    tied = [each.name for each in found.measured[1:] if each.tied]
    if tied:
        words.append(f"It is not separated from {listed(tied, MOST_NAMED)}.")
    promising = found.promising
    if promising is not None:
        words.append(
            f"Predicted to need less: {promising.name} ({number(promising.value.median)}, interval "
            f"{_bounds(promising)})."
        )
    return " ".join(words)


def measurement_sentence(found: NextMeasurement) -> str:
    """Say what to measure next, and how many repeats are expected to decide."""
    count = len(found.configurations)
    words = f"Not decided: repeat {count} configurations once more with --measure"
    if found.further_repeats is None:
        return f"{words}."
    return f"{words} ({further_words(found.further_repeats)})."


def _table(
    title: str, candidates: Sequence[Candidate], reasons: Mapping[str, str]
) -> Table[Candidate]:
    columns: list[Column[Candidate]] = [
        Column("", lambda each: NEAR_MARK if each.tied else "", "name"),
        Column("configuration", lambda each: each.name, "text"),
        Column("value", lambda each: number(each.value.median)),
        Column("interval", _bounds),
        Column("reason", lambda each: reasons.get(each.configuration or "", each.reason), "text"),
    ]
    return Table(columns=columns, items=candidates[:_MOST_SHOWN], title=title)


def _bounds(candidate: Candidate) -> str:
    value = candidate.value
    if value.low == value.high:
        return NOT_MEASURED
    if not value.is_known:
        return NOT_KNOWN
    return f"{number(value.low)} to {number(value.high)}"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
