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
_GAP = ("no samples: the sidecar had died", "#B93C00")


def shades(*, gaps: bool = False) -> list[tuple[str, str]]:
    """What the shades behind the curves over time mean: words and colour."""
    return [*_SHADES.values(), *([_GAP] if gaps else [])]


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
    mark_spans(figure, record, host)
    time_axis(figure, record)
    return chart(figure, title=title, caption="", height_px=270, legend=True)


def time_axis(figure: go.Figure, record: TrialRecord) -> None:
    """The same for all figures of a trial, so that they can be read one below the other."""
    ends = [h.samples[-1].unix_s - time_zero(record, h) for h in record.hosts if h.samples]
    if record.outcome is not None:
        ends.append(record.outcome.ended_unix_s - record.outcome.launched_unix_s)
    figure.update_xaxes(title="seconds since the launch command", range=[0, max(ends)])


def mark_spans(
    figure: go.Figure, record: TrialRecord, host: HostTrace, *, spans: bool = True
) -> None:
    """Shade what the ranks on `host` were doing, and the stretches without samples.

    spans: False shades the latter alone, where the figure's own colours fill it.
    """
    start = time_zero(record, host)
    for name, (_, colour) in _SHADES.items() if spans else ():
        span = span_on_host(record, host.host, name)
        if span is not None:
            _shade(figure, span[0] - start, span[1] - start, colour, 0.16)
    for gap in host.gaps:
        began, ended = gap.gap_started_unix_s - start, gap.gap_ended_unix_s - start
        _shade(figure, began, ended, _GAP[1], 0.3)
        _break_lines(figure, (began + ended) / 2)


def _shade(figure: go.Figure, began_s: float, ended_s: float, colour: str, opacity: float) -> None:
    figure.add_vrect(
        x0=began_s, x1=ended_s, fillcolor=colour, opacity=opacity, line_width=0, layer="below"
    )


def _break_lines(figure: go.Figure, at_s: float) -> None:
    """No line joins what was sampled before a gap with what was after it."""
    for line in figure.select_traces({"type": "scatter"}):
        time, values = np.asarray(line.x), np.asarray(line.y)
        place = int(np.searchsorted(time, at_s))
        line.x = np.insert(time, place, np.float32(at_s))
        line.y = np.insert(values, place, np.float32(np.nan))


def time_zero(record: TrialRecord, host: HostTrace) -> float:
    launched = launch_on_host(record, host.host)
    return host.samples[0].unix_s if launched is None else launched
