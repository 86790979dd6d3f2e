"""Curves over time, as figures for Plotly's library in the page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
from monitoring.pictures.axes import tick_values, time_step_s, value_range
from monitoring.pictures.units import text, tick_texts

from paceline.report.figures.charts import PALETTE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from monitoring.pictures.board import Panel, Window
    from monitoring.pictures.source import Series

# Grafana's names for colours, dark enough for a white page
COLOURS = {
    "green": "#1A7F4B",
    "orange": "#C46200",
    "red": "#C4162A",
    "blue": "#1F60C4",
    "purple": "#8F3BB8",
}
_DASHES = ("solid", "dash", "dot")
_GRID, _INK = "#E6E6E6", "#555555"
_FONT = {"family": "Inter, system-ui, sans-serif", "size": 11, "color": _INK}
_LONGEST_GAP = 1.5  # steps; a curve is not drawn across more
# a start's query has a value for five seconds, which say nothing: what lasts longer is shaded
_MOMENT_S = 6.0


@dataclass(frozen=True, slots=True)
class Curve:
    """A series with its name in the legend, its colour and its way of being drawn."""

    name: str
    colour: str
    dash: str
    series: Series

    @property
    def mean(self) -> float:
        return sum(self.series.values) / len(self.series.values)

    @property
    def most(self) -> float:
        return max(self.series.values)


@dataclass(frozen=True, slots=True)
class MarkedTime:
    """A moment, or a time, that an annotation marks."""

    colour: str
    start_unix_s: float
    end_unix_s: float


def coloured(named: Iterable[tuple[str, Series]]) -> list[Curve]:
    """As many colours as there are; then the same again, dashed."""
    return [
        Curve(
            name,
            PALETTE[number % len(PALETTE)],
            _DASHES[number // len(PALETTE) % len(_DASHES)],
            series,
        )
        for number, (name, series) in enumerate(named)
    ]


def time_figure(
    panel: Panel,
    curves: Sequence[Curve],
    marked: Sequence[MarkedTime],
    window: Window,
) -> str:
    """A panel's curves, thresholds and marks, in Plotly's JSON; the page says how large."""
    figure = go.Figure()
    for curve in curves:
        times, values = with_gaps(curve.series, window.step_s)
        line = {"color": curve.colour, "dash": curve.dash, "width": 1.3}
        area: dict[str, Any] = {}
        if panel.stacked:
            line["width"] = 0.5
            area = {"stackgroup": "all", "fillcolor": _faint(curve.colour, 0.55)}
        figure.add_scatter(x=times, y=values, mode="lines", line=line, **area)
    start, end = value_range(_heights(panel, curves), panel.low, panel.high)
    _mark(figure, marked)
    if panel.threshold_lines:
        _draw_thresholds(figure, panel, start, end)
    ticks = tick_values(start, end, panel.unit, panel.decimals)
    texts = tick_texts(ticks, panel.unit)
    if panel.decimals is not None:
        texts = [text(tick, panel.unit, panel.decimals) for tick in ticks]
    figure.update_yaxes(range=[start, end], tickvals=ticks, ticktext=texts)
    span_ms = [1000 * window.start_unix_s, 1000 * window.end_unix_s]
    step_s = time_step_s(window.range_s)
    figure.update_xaxes(type="date", range=span_ms, dtick=1000 * step_s)
    figure.update_xaxes(tickformat="%H:%M" if step_s % 60 == 0 else "%H:%M:%S")
    figure.update_xaxes(tickangle=0, ticks="outside", ticklen=3, tickcolor=_GRID)
    figure.update_yaxes(automargin=True)
    return _finished(figure, {"l": 8, "r": 12, "t": 6, "b": 22})


def spark_figure(panel: Panel, series: Series, colour: str, window: Window) -> str:
    """The course behind a single figure: no axes, no words."""
    figure = go.Figure()
    times, values = with_gaps(series, window.step_s)
    filled = {"fill": "tozeroy", "fillcolor": _faint(colour, 0.15)}
    line = {"color": colour, "width": 1.2}
    figure.add_scatter(x=times, y=values, mode="lines", line=line, **filled)
    start, end = value_range([0.0, *series.values], panel.low, panel.high)
    figure.update_yaxes(visible=False, range=[start, end])
    span_ms = [1000 * window.start_unix_s, 1000 * window.end_unix_s]
    figure.update_xaxes(visible=False, type="date", range=span_ms)
    return _finished(figure, {"l": 0, "r": 0, "t": 2, "b": 0})


def with_gaps(series: Series, step_s: int) -> tuple[list[float], list[float | None]]:
    """Times in milliseconds and values, None between those that are more than a step apart."""
    times_ms: list[float] = []
    values: list[float | None] = []
    last_s = math.inf
    for at, value in zip(series.times_unix_s, series.values, strict=True):
        if at - last_s > _LONGEST_GAP * step_s:
            times_ms.append(1000 * (last_s + step_s))
            values.append(None)
        times_ms.append(1000 * at)
        values.append(value)
        last_s = at
    return times_ms, values


def _heights(panel: Panel, curves: Sequence[Curve]) -> list[float]:
    """What the axis has to reach: all values, or the heights of what is stacked."""
    if not panel.stacked:
        return list(chain.from_iterable(curve.series.values for curve in curves))
    sums: dict[float, float] = {}
    for curve in curves:
        for at, value in zip(curve.series.times_unix_s, curve.series.values, strict=True):
            sums[at] = sums.get(at, 0.0) + value
    return list(sums.values())


def _mark(figure: go.Figure, marked: Sequence[MarkedTime]) -> None:
    for mark in marked:
        colour = COLOURS[mark.colour]
        begin_ms = 1000 * mark.start_unix_s
        line = {"color": _faint(colour, 0.6), "width": 1, "dash": "dot"}
        figure.add_vline(x=begin_ms, line=line, layer="below")
        if mark.end_unix_s - mark.start_unix_s > _MOMENT_S:
            end_ms = 1000 * mark.end_unix_s
            figure.add_vrect(x0=begin_ms, x1=end_ms, fillcolor=_faint(colour, 0.08), line_width=0)


def _draw_thresholds(figure: go.Figure, panel: Panel, start: float, end: float) -> None:
    """Those that the axis reaches, as in Grafana: a panel is not drawn smaller to show them."""
    for threshold in panel.thresholds:
        if threshold.value is not None and start <= threshold.value <= end:
            line = {"color": COLOURS[threshold.colour], "width": 1, "dash": "dash"}
            figure.add_hline(y=threshold.value, line=line)


def _finished(figure: go.Figure, margin: dict[str, int]) -> str:
    figure.update_layout(
        template="none",
        margin=margin,
        font=_FONT,
        showlegend=False,
        paper_bgcolor="white",
        plot_bgcolor="white",
    )
    figure.update_xaxes(gridcolor=_GRID, zeroline=False)
    figure.update_yaxes(gridcolor=_GRID, zeroline=False)
    found: str = figure.to_json()
    return found


def _faint(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
