"""What a Prometheus answers to a dashboard's queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from monitoring.pictures.board import filled, legend
from monitoring.pictures.curves import MarkedTime

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from monitoring.pictures.board import Board, Panel, Window
    from monitoring.pictures.source import Series, Source


@dataclass(frozen=True, slots=True)
class Answer:
    """A panel's series by the reference of the query; with their names, in order."""

    by_ref: Mapping[str, Sequence[Series]]
    named: Sequence[tuple[str, Series]]


def ask(source: Source, panel: Panel, window: Window) -> Answer:
    """Names that differ only in labels that the legend leaves out stay as they are."""
    by_ref: dict[str, list[Series]] = {}
    named: list[tuple[str, Series]] = []
    for target in panel.targets:
        expr = filled(target.expr, window)
        if target.instant:
            found = source.at(expr, window.end_unix_s)
        else:
            found = source.over(expr, window.start_unix_s, window.end_unix_s, window.step_s)
        by_ref[target.ref] = found
        named += sorted(
            ((legend(target.legend, series.labels), series) for series in found),
            key=lambda pair: pair[0],
        )
    return Answer(by_ref, named)


def marked_times(source: Source, board: Board, window: Window) -> dict[str, list[MarkedTime]]:
    """By an annotation's name, of those that are on; moments of a series that follow one another
    are one time."""
    found: dict[str, list[MarkedTime]] = {}
    for mark in board.marks:
        if not mark.on:
            continue
        times = found.setdefault(mark.name, [])
        expr = filled(mark.expr, window)
        for series in source.over(expr, window.start_unix_s, window.end_unix_s, 1):
            for start, end in _stretches(series.times_unix_s):
                times.append(MarkedTime(mark.colour, start, end))
    return found


def _stretches(times_unix_s: Sequence[float]) -> list[tuple[float, float]]:
    stretches: list[tuple[float, float]] = []
    for at in times_unix_s:
        if stretches and at - stretches[-1][1] < 1.5:
            stretches[-1] = (stretches[-1][0], at)
        else:
            stretches.append((at, at))
    return stretches
