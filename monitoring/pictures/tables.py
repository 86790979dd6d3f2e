"""A table panel's rows: the answers of its queries put together, as its transformations say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from monitoring.pictures.units import text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from monitoring.pictures.board import Panel
    from monitoring.pictures.source import Series


@dataclass(frozen=True, slots=True)
class Table:
    """`numbers`: which columns are figures, and so stand to the right. `widths_px`: of columns
    that have one of their own; all others share what is left."""

    headings: tuple[str, ...]
    numbers: tuple[bool, ...]
    widths_px: tuple[int | None, ...]
    rows: tuple[tuple[str, ...], ...]


def merged(panel: Panel, answers: Mapping[str, Sequence[Series]]) -> Table:
    """A row for each set of labels that the answers (by the query's reference) have.

    Where an answer has fewer labels than another, its figures go to every row that has the same
    values of them, as Grafana's transformation `merge` does it.
    """
    columns = panel.columns
    rows: list[dict[str, str]] = []
    numbers: set[str] = set()
    for ref, found in answers.items():
        name = f"Value #{ref}" if len(answers) > 1 else "Value"
        numbers.add(name)
        heading = columns.headings.get(name, name)
        unit, decimals = columns.units.get(heading, panel.unit), columns.decimals.get(heading)
        for series in found:
            same = [row for row in rows if name not in row and _agree(row, series.labels)]
            if not same:
                same = [{}]
                rows += same
            for row in same:
                row.update(series.labels)
                row[name] = text(series.values[-1], unit, decimals)
    there = {name for row in rows for name in row} | numbers
    names = sorted(
        there - columns.hidden, key=lambda name: (columns.order.get(name, len(columns.order)), name)
    )
    headings = tuple(columns.headings.get(name, name) for name in names)
    return Table(
        headings=headings,
        numbers=tuple(name in numbers for name in names),
        widths_px=tuple(columns.widths_px.get(heading) for heading in headings),
        rows=tuple(sorted(tuple(row.get(name, "") for name in names) for row in rows)),
    )


def _agree(row: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether all labels that both have are the same."""
    return all(row.get(label, value) == value for label, value in labels.items())
