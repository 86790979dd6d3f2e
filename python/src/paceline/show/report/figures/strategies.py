"""Figures of local strategies: use of a node over time, and speed under other launchers."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from paceline.analysis.compare.local_global import Elsewhere, LocalGlobal, StrategyLine
from paceline.analysis.compare.result import Comparison
from paceline.analysis.compare.row import Row, local_name, strategy_name
from paceline.analysis.trial.host_frames import read_series
from paceline.show.report.figures.charts import (
    GREY,
    MOST_SHOWN,
    PALETTE,
    Chart,
    chart,
    colours,
    spread,
)
from paceline.show.report.figures.hosts import curve
from paceline.show.report.wording import DASH, arithmetic_words, bounds, place_name, reach

_USES = (("CPU, %", "cpu_busy_percent"), ("RAM, %", "ram_percent"), ("threads", "run_threads"))
_SYMBOLS = ("circle", "diamond", "triangle-up", "star", "cross", "x")


def local_use_chart(comparison: Comparison, workload: str, rows: Sequence[Row]) -> Chart | None:
    """Draw CPU, RAM and threads over time, a row of small figures for each strategy.

    rows: of launcher `local`. This is figure 2 of the paper. None where nothing was sampled.
    """
    palette = colours(comparison)
    found = []
    for row in rows[:MOST_SHOWN]:
        trial = comparison.trials[row.configuration][0]
        host = next(iter(read_series(trial.record.files)), None)
        if host is not None:
            found.append((row, trial, host))
    if not found:
        return None
    figure = make_subplots(
        rows=len(found),
        cols=len(_USES),
        shared_xaxes=True,
        shared_yaxes="columns",
        vertical_spacing=0.3 / len(found),
        column_titles=[title for title, _ in _USES],
        row_titles=[local_name(row, comparison.rows) for row, _, _ in found],
    )
    figure.update_annotations(font={"size": 11}, yanchor="bottom", yshift=16)
    # names stand above their rows: beside them, a phone would have no room for the curves
    for number, note in enumerate(figure.layout.annotations[len(_USES) :], start=1):
        top = figure.get_subplot(number, 1).yaxis.domain[1]
        note.update(x=0, y=top, yshift=0, xanchor="left", textangle=0)
    for number, (row, trial, host) in enumerate(found, start=1):
        for column, (_, name) in enumerate(_USES, start=1):
            time_s, values = curve(trial.record, host, host.frame, name)
            figure.add_scatter(
                x=time_s,
                y=values,
                mode="lines",
                line={"color": palette[row.configuration], "width": 1.5},
                showlegend=False,
                row=number,
                col=column,
            )
    figure.update_yaxes(rangemode="tozero", nticks=3)
    figure.update_xaxes(rangemode="tozero", nticks=5)
    figure.update_xaxes(title_text="seconds since the launch", row=len(found), col=2)
    return chart(
        figure,
        title=f"CPU, RAM and threads over time, {workload}",
        caption="First repeat of each strategy under launcher local. CPU and RAM are the host's, "
        "threads are the run's.",
        height_px=110 + 96 * len(found),
        top=40,
    )


def local_global_chart(comparison: Comparison, found: LocalGlobal) -> Chart:
    """Draw the speedup of each strategy alone and under other launchers."""
    palette = _strategy_colours(comparison, found)
    names = {
        line.configuration: strategy_name(comparison.row(line.configuration), comparison.rows)
        for line in found.lines
        if line.elsewhere
    }
    figure = go.Figure()
    most = 0.0
    for number, relation in enumerate(found.relations):
        place = (relation.launcher, relation.nodes)
        pairs = [(li, e) for li in found.lines if (e := li.under(*place)) is not None]
        most = max([most, *(max(reach(li.speedup), reach(e.speedup)) for li, e in pairs)])
        symbol = _SYMBOLS[number % len(_SYMBOLS)]
        _legend_entry(figure, f"under {place_name(*place)}", symbol, GREY)
        figure.add_scatter(
            x=[li.speedup.median for li, _ in pairs],
            y=[e.speedup.median for _, e in pairs],
            error_x=spread([li.speedup for li, _ in pairs]),
            error_y=spread([e.speedup for _, e in pairs]),
            showlegend=False,
            mode="markers",
            marker={
                "size": 11,
                "symbol": symbol,
                "color": [palette[li.configuration] for li, _ in pairs],
            },
            customdata=[_both(*pair) for pair in pairs],
            text=[names[li.configuration] for li, _ in pairs],
            hovertemplate="%{text}<br>%{customdata}<extra></extra>",
        )
    for configuration, name in names.items():
        _legend_entry(figure, name, "square", palette[configuration])
    figure.add_shape(
        type="line", x0=0, y0=0, x1=most, y1=most, line={"dash": "dot", "width": 1, "color": GREY}
    )
    figure.update_xaxes(title="speedup alone (launcher local)", range=[0, most * 1.08])
    figure.update_yaxes(title="speedup under another launcher", range=[0, most * 1.08])
    return chart(
        figure,
        title=f"Speedup alone and under other launchers, {found.workload}"
        + arithmetic_words(comparison, found),
        caption="Colour: strategy; shape: launcher; lines: 95 % confidence intervals. On the "
        "dotted line both speedups are equal.",
        height_px=460,
        legend=True,
    )


def _strategy_colours(comparison: Comparison, found: LocalGlobal) -> dict[str, str]:
    """Return the colours of the other figures, unless strategies share one there."""
    names = [line.configuration for line in found.lines if line.elsewhere]
    palette = colours(comparison)
    if len({palette[name] for name in names}) == len(names):
        return palette
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(names)}


def _legend_entry(figure: go.Figure, name: str, symbol: str, colour: str) -> None:
    figure.add_scatter(
        x=[None],
        y=[None],
        name=name,
        mode="markers",
        marker={"size": 10, "symbol": symbol, "color": colour},
    )


def _both(line: StrategyLine, elsewhere: Elsewhere) -> str:
    ratio = DASH if elsewhere.ratio is None else f"{elsewhere.ratio.median:.2f}"
    return (
        f"alone {line.speedup.median:.2f} ({bounds(line.speedup)})<br>"
        f"{place_name(elsewhere.launcher, elsewhere.nodes)} {elsewhere.speedup.median:.2f} "
        f"({bounds(elsewhere.speedup)})<br>ratio {ratio}"
    )
