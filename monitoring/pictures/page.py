"""Pages of a dashboard's panels, where its grid has them, each as long as a picture may be."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from monitoring.pictures.answers import ask, marked_times
from monitoring.pictures.curves import COLOURS
from monitoring.pictures.drawing import Place, drawn

from paceline.report.figures.charts import plotly_js

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from monitoring.pictures.board import Board, Row, Window
    from monitoring.pictures.curves import MarkedTime
    from monitoring.pictures.source import Source

_WIDTH_PX = 1320
_EDGE_PX = 12
_GAP_PX = 8
_CELL_PX = 36  # Grafana's is 30; descriptions, which it shows on demand, need the rest
_COLUMNS = 24
_HEAD_PX = 56
_ROW_HEAD_PX = 34
_LONGEST_PX = 1560


@dataclass(frozen=True, slots=True)
class Page:
    """A page that needs nothing else, and its size."""

    html: str
    width_px: int
    height_px: int


def pages(source: Source, board: Board, window: Window) -> Iterator[Page]:
    """As few as there can be without cutting a row in two."""
    marks = marked_times(source, board, window)
    flat = [mark for times in marks.values() for mark in times]
    rows = [_row(source, row, window, flat) for row in board.rows]
    for number, shown in enumerate(_shared_out(rows)):
        yield _page(board, window, marks, shown, head=number == 0)


def _row(source: Source, row: Row, window: Window, marked: Sequence[MarkedTime]) -> dict[str, Any]:
    """Words and places, from the row's own top on. A closed row is opened if it has data."""
    answers = [ask(source, panel, window) for panel in row.panels]
    if row.closed and not any(answer.named for answer in answers):
        names = ", ".join(panel.title for panel in row.panels)
        return {
            "title": row.title,
            "note": f"closed; {row.panels[0].no_value} ({names})",
            "panels": [],
            "height_px": _ROW_HEAD_PX,
        }
    top = min(panel.y for panel in row.panels)
    places = [
        Place(
            left_px=_EDGE_PX + round(panel.x * _column_px()),
            top_px=_ROW_HEAD_PX + (panel.y - top) * (_CELL_PX + _GAP_PX),
            width_px=round(panel.width * _column_px()) - _GAP_PX,
            height_px=panel.height * (_CELL_PX + _GAP_PX) - _GAP_PX,
        )
        for panel in row.panels
    ]
    return {
        "title": row.title,
        "note": "",
        "panels": [
            drawn(panel, answer, place, marked, window)
            for panel, answer, place in zip(row.panels, answers, places, strict=True)
        ],
        "height_px": max(p.top_px + p.height_px for p in places) + _GAP_PX,
    }


def _column_px() -> float:
    return (_WIDTH_PX - 2 * _EDGE_PX + _GAP_PX) / _COLUMNS


def _shared_out(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    shares: list[list[dict[str, Any]]] = [[]]
    filled_px = _HEAD_PX
    for row in rows:
        if shares[-1] and filled_px + row["height_px"] > _LONGEST_PX:
            shares.append([])
            filled_px = 0
        shares[-1].append(row)
        filled_px += row["height_px"]
    return shares


def _page(
    board: Board,
    window: Window,
    marks: dict[str, list[MarkedTime]],
    rows: Sequence[dict[str, Any]],
    *,
    head: bool,
) -> Page:
    placed = []
    top_px = _EDGE_PX + (_HEAD_PX if head else 0)
    for row in rows:
        panels = [{**panel, "top_px": panel["top_px"] + top_px} for panel in row["panels"]]
        placed.append({**row, "top_px": top_px, "panels": panels})
        top_px += row["height_px"]
    height_px = top_px + _EDGE_PX - _GAP_PX
    colours = {mark.name: COLOURS[mark.colour] for mark in board.marks}
    template = _templates().get_template("page.html.j2")
    html = template.render(
        board=board,
        window=window,
        span=_span(window),
        marks=[(name, colours[name], len(times)) for name, times in marks.items()],
        off=", ".join(mark.name for mark in board.marks if not mark.on),
        rows=placed,
        head=head,
        width_px=_WIDTH_PX,
        height_px=height_px,
        edge_px=_EDGE_PX,
        # a script ends at its end tag, also within a string
        plotly=Markup(plotly_js().replace("</script", "<\\/script")),  # noqa: S704  (the library)
    )
    return Page(html, _WIDTH_PX, height_px)


@cache
def _templates() -> Environment:
    return Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FileSystemLoader(Path(__file__).parent),
    )


def _span(window: Window) -> str:
    begin, end = (
        datetime.fromtimestamp(at, UTC) for at in (window.start_unix_s, window.end_unix_s)
    )
    return f"{begin:%Y-%m-%d %H:%M:%S} to {end:%H:%M:%S} UTC"
