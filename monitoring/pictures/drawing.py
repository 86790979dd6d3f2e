"""Panels of each kind, as what the page's template puts into their place."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from monitoring.pictures.board import colour_at
from monitoring.pictures.curves import COLOURS, coloured, spark_figure, time_figure
from monitoring.pictures.tables import merged
from monitoring.pictures.units import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from monitoring.pictures.answers import Answer
    from monitoring.pictures.board import Panel, Window
    from monitoring.pictures.curves import Curve, MarkedTime

_LEGEND_LINE_PX = 15
_BESIDES_LEGEND_PX = 185  # title, description, and a curve that can be read
_LEGEND_LETTER_PX, _LEGEND_GAPS_PX = 6, 85
_DASHES = {"solid": "solid", "dash": "dashed", "dot": "dotted"}
_FIGURE_PX, _FIGURE_LEAST_PX = 30, 16  # the size of a single figure's letters
_LETTER = 0.68  # the width of a letter by its size, rather too much than too little
_MARGIN_PX = 20
_BESIDES_BARS_PX = 56
_BAR_PX, _BAR_WITH_NAME_PX = 18, 33
_ROOMY_BAR_PX = 43  # then a bar's name stands above it, else beside it
_BAR_LETTER_PX = 14
_EMPTY: dict[str, Any] = {
    "nothing": "",
    "figure": None,
    "plot": "",
    "legends": [],
    "table": None,
    "bars": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    left_px: int
    top_px: int
    width_px: int
    height_px: int


def drawn(
    panel: Panel, answer: Answer, place: Place, marked: Sequence[MarkedTime], window: Window
) -> dict[str, Any]:
    """All that the template asks for. Raises ValueError for a kind that is not known."""
    head = {**_EMPTY, **asdict(place), "title": panel.title, "description": panel.description}
    if not answer.named:
        return {**head, "nothing": panel.no_value}
    if panel.kind == "timeseries":
        curves = coloured(answer.named)
        plot = time_figure(panel, curves, marked, window)
        return {**head, "plot": plot, **_legend(panel, curves, place)}
    if panel.kind == "stat":
        return {**head, **_stat(panel, answer, place, window)}
    if panel.kind == "bargauge":
        return {**head, "bars": _bars(panel, answer, place)}
    if panel.kind == "table":
        table = merged(panel, answer.by_ref)
        heads = list(zip(table.headings, table.numbers, table.widths_px, strict=True))
        rows = [list(zip(row, table.numbers, strict=True)) for row in table.rows]
        return {**head, "table": {"heads": heads, "rows": rows}}
    raise ValueError(f"{panel.title}: panels of the kind {panel.kind!r} are not drawn so far")


def _legend(panel: Panel, curves: Sequence[Curve], place: Place) -> dict[str, Any]:
    """Names with mean and maximum, in columns; those that have no room are counted."""
    most_lines = (place.height_px - _BESIDES_LEGEND_PX) // _LEGEND_LINE_PX - 1
    entries = [
        {
            "colour": curve.colour,
            "dash": _DASHES[curve.dash],
            "name": curve.name,
            "mean": text(curve.mean, panel.unit, panel.decimals),
            "most": text(curve.most, panel.unit, panel.decimals),
        }
        for curve in curves
    ]
    letters = max(len(e["name"]) + len(e["mean"]) + len(e["most"]) for e in entries)
    widest_px = _LEGEND_LETTER_PX * letters + _LEGEND_GAPS_PX
    columns = 2 if 2 * widest_px <= place.width_px and len(entries) > 2 else 1
    lines = min(most_lines, -(-len(entries) // columns))
    if len(entries) > lines * columns:
        shown = lines * columns - 1
        more = {"colour": "", "dash": "", "name": f"and {len(entries) - shown} more"}
        entries = [*entries[:shown], {**more, "mean": "", "most": ""}]
    return {"legends": [entries[n : n + lines] for n in range(0, len(entries), lines)]}


def _stat(panel: Panel, answer: Answer, place: Place, window: Window) -> dict[str, Any]:
    """The last value of the first series; the dashboards' figures have one."""
    _, series = answer.named[0]
    last = series.values[-1]
    colour = COLOURS[colour_at(last, panel.thresholds)]
    words = text(last, panel.unit, panel.decimals)
    fitting_px = (place.width_px - _MARGIN_PX) / (_LETTER * len(words))
    size_px = round(min(_FIGURE_PX, max(_FIGURE_LEAST_PX, fitting_px)))
    return {
        "figure": {"text": words, "colour": colour, "size_px": size_px},
        "plot": spark_figure(panel, series, colour, window),
    }


def _bars(panel: Panel, answer: Answer, place: Place) -> dict[str, Any]:
    values = [(name, series.values[-1]) for name, series in answer.named]
    low = panel.low or 0.0
    high = panel.high if panel.high is not None else max(value for _, value in values)
    texts = [text(value, panel.unit, panel.decimals) for _, value in values]
    each_px = (place.height_px - _BESIDES_BARS_PX) / len(values)
    letters = max(map(len, texts))
    above = each_px >= _ROOMY_BAR_PX
    left_px = each_px - (_BAR_WITH_NAME_PX if above else _BAR_PX)
    return {
        "above": above,
        "gap_px": round(max(0.0, min(left_px, _BAR_WITH_NAME_PX))),
        "value_px": round(_LETTER * _BAR_LETTER_PX * letters) + 12,
        "shown": [
            {
                "name": name,
                "percent": 100 * max(0.0, min(1.0, (value - low) / ((high - low) or 1.0))),
                "colour": COLOURS[colour_at(value, panel.thresholds)],
                "value": words,
            }
            for (name, value), words in zip(values, texts, strict=True)
        ],
    }
