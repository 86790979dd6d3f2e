"""The result of `paceline verify` for the terminal."""

from __future__ import annotations

from paceline.analysis.equivalence.observed import Finding
from paceline.report.section import Cell, Column, Section, Table

_MARKS = {True: ("✓", "yes"), False: ("✗", "no"), None: ("?", "unknown")}
Line = tuple[str, "Finding"]  # words for a layout, and what was found


def _mark(line: Line) -> Cell:
    text, style = _MARKS[line[1].passed]
    return Cell(text, style=style)


def _where(line: Line) -> str:
    return "" if line[1].step is None else f"step {line[1].step + 1}"


_COLUMNS: tuple[Column[Line], ...] = (
    Column("", _mark, "name"),
    Column("layout", lambda line: line[0], "text"),
    Column("first\ndifference", _where, "name"),
    Column("what was found", lambda line: line[1].reason, "text"),
)


def verified_section(lines: list[Line], *, passed: bool | None) -> Section:
    """Return a line for each layout, and a sentence about all of them."""
    sentence = {
        True: "Every layout trains what one process trains.",
        False: "Not every layout trains what one process trains.",
        None: "Not every layout could be compared with one process.",
    }[passed]
    return Section(table=Table(columns=_COLUMNS, items=lines), sentences=[sentence])
