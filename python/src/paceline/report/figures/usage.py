"""Figures of what a host did over time, as figures 2 and 5 of the paper."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from paceline.analysis.usage import (
    busy_percent,
    iowait_percent,
    launch_on_host,
    ram_percent,
    span_on_host,
)
from paceline.report.figures.charts import BLUE, GREEN, ORANGE, RED, chart, curve, thinned

if TYPE_CHECKING:
    from paceline.analysis.comparison import TrialAnalysis
    from paceline.analysis.reading import HostTrace, TrialRecord
    from paceline.report.figures.charts import Chart

# spans that are marked behind the curves over time
_SHADES = {
    "imports": ("imports", "#9C8F7A"),
    "data_load": ("data loading", "#C9B458"),
    "train": ("training", "#56B4E9"),
    "bookkeeping": ("writing results", "#CC79A7"),
}


def shades() -> list[tuple[str, str]]:
    """What the shades behind the curves over time mean: words and colour."""
    return list(_SHADES.values())


def resource_charts(trial: TrialAnalysis) -> list[tuple[Chart, Chart]]:
    """For each host of a trial: CPU, RAM and threads over time; CPU idle and IOWait over time.

    The first is figure 2 of the paper, the second its figure 5; hosts without samples are left out.
    """
    return [
        (_use_chart(trial.record, host), _idle_chart(trial.record, host))
        for host in trial.record.hosts
        if host.samples
    ]


def _use_chart(record: TrialRecord, host: HostTrace) -> Chart:
    start = time_zero(record, host)
    time = thinned(np.array([s.unix_s - start for s in host.samples]))
    figure = go.Figure()
    curves = (
        ("CPU", BLUE, [busy_percent(s) for s in host.samples]),
        ("RAM", GREEN, [ram_percent(s) for s in host.samples]),
    )
    for name, colour, values in curves:
        figure.add_scatter(
            x=time, y=curve(values), name=f"{name} (%)", mode="lines", line={"color": colour}
        )
    most_threads = max(s.run_threads for s in host.samples)
    figure.add_scatter(
        x=time,
        y=curve([s.run_threads for s in host.samples]),
        name="threads of the run (right)",
        mode="lines",
        line={"color": ORANGE, "dash": "dot"},
        yaxis="y2",
    )
    figure.update_layout(
        yaxis2={
            "title": "threads",
            "overlaying": "y",
            "side": "right",
            "range": [0, most_threads * 1.05 + 1],
            "tickmode": "auto",
            "tickformat": "d",
            "nticks": 6,
            "showgrid": False,
        }
    )
    figure.update_layout(yaxis={"title": "% of the host", "range": [0, 102]})
    return _over_time(figure, record, host, f"CPU, RAM, threads on {host.host}")


def _idle_chart(record: TrialRecord, host: HostTrace) -> Chart:
    start = time_zero(record, host)
    time = thinned(np.array([s.unix_s - start for s in host.samples]))
    figure = go.Figure()
    curves = (
        ("CPU idle", BLUE, [s.cpu_idle_percent for s in host.samples]),
        ("IOWait", RED, [iowait_percent(s) for s in host.samples]),
    )
    for name, colour, values in curves:
        figure.add_scatter(
            x=time, y=curve(values), name=f"{name} (%)", mode="lines", line={"color": colour}
        )
    figure.update_yaxes(title="% of the host's CPU time", range=[0, 102])
    return _over_time(figure, record, host, f"CPU idle and IOWait on {host.host}")


def _over_time(figure: go.Figure, record: TrialRecord, host: HostTrace, title: str) -> Chart:
    start = time_zero(record, host)
    for name, (_, colour) in _SHADES.items():
        span = span_on_host(record, host.host, name)
        if span is None:
            continue
        low, high = span[0] - start, span[1] - start
        figure.add_vrect(
            x0=low, x1=high, fillcolor=colour, opacity=0.16, line_width=0, layer="below"
        )
    figure.update_xaxes(title="seconds since the launch command", rangemode="tozero")
    return chart(figure, title=title, caption="", height_px=270, legend=True)


def time_zero(record: TrialRecord, host: HostTrace) -> float:
    launched = launch_on_host(record, host.host)
    return host.samples[0].unix_s if launched is None else launched
