"""Figures of a host over time, as figures 2 and 5 of the paper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from paceline.analysis.usage import launch_on_host, span_on_host
from paceline.report.figures.charts import BLUE, GREEN, ORANGE, RED, chart, thinned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paceline.analysis.host_frames import HostSeries
    from paceline.analysis.reading import TrialRecord
    from paceline.report.figures.charts import Chart

# spans that are marked behind the curves over time
_SHADES = {
    "imports": ("imports", "#9C8F7A"),
    "data_load": ("data loading", "#C9B458"),
    "train": ("training", "#56B4E9"),
    "bookkeeping": ("writing results", "#CC79A7"),
}
_GAP = ("no samples: the sidecar was not running", "#B93C00")


def shades(*, gaps: bool = False) -> list[tuple[str, str]]:
    """List the shades behind the curves over time: label and colour."""
    return [*_SHADES.values(), *([_GAP] if gaps else [])]


def resource_charts(record: TrialRecord, hosts: Sequence[HostSeries]) -> list[tuple[Chart, Chart]]:
    """Draw two charts for each host: CPU, RAM and threads; CPU idle and IOWait.

    The first is figure 2 of the paper, the second its figure 5.
    """
    return [(_use_chart(record, hosts, host), _idle_chart(record, hosts, host)) for host in hosts]


def _use_chart(record: TrialRecord, hosts: Sequence[HostSeries], host: HostSeries) -> Chart:
    time = times(record, host)
    figure = go.Figure()
    curves = (("CPU", BLUE, "cpu_busy_percent"), ("RAM", GREEN, "ram_percent"))
    for name, colour, column in curves:
        _line(figure, time, values(host, column), f"{name} (%)", {"color": colour})
    threads = values(host, "run_threads")
    line = {"color": ORANGE, "dash": "dot"}
    _line(figure, time, threads, "threads of the run (right)", line, axis="y2")
    figure.update_layout(
        yaxis2={
            "title": "threads",
            "overlaying": "y",
            "side": "right",
            "range": [0, float(np.nanmax(threads)) * 1.05 + 1],
            "tickmode": "auto",
            "tickformat": "d",
            "nticks": 6,
            "showgrid": False,
        }
    )
    figure.update_layout(yaxis={"title": "% of the host", "range": [0, 102]})
    return _over_time(figure, record, hosts, host, f"CPU, RAM, threads on {host.host}")


def _idle_chart(record: TrialRecord, hosts: Sequence[HostSeries], host: HostSeries) -> Chart:
    time = times(record, host)
    figure = go.Figure()
    curves = (("CPU idle", BLUE, "cpu_idle_percent"), ("IOWait", RED, "cpu_iowait_percent"))
    for name, colour, column in curves:
        _line(figure, time, values(host, column), f"{name} (%)", {"color": colour})
    figure.update_yaxes(title="% of the host's CPU time", range=[0, 102])
    return _over_time(figure, record, hosts, host, f"CPU idle and IOWait on {host.host}")


def values(host: HostSeries, column: str) -> NDArray[np.float32]:
    """Return a column as a thinned curve, NaN where it was not measured."""
    if column not in host.frame.columns:
        return thinned(np.full(len(host.frame), np.nan))
    return thinned(host.frame[column].cast(float).to_numpy())


def times(record: TrialRecord, host: HostSeries) -> NDArray[np.float32]:
    """Return the thinned times of a host's samples, seconds since the launch."""
    return thinned(host.frame["unix_s"].to_numpy() - time_zero(record, host))


def time_axis(figure: go.Figure, record: TrialRecord, hosts: Sequence[HostSeries]) -> None:
    """Use one range for all figures of a trial, so that they can be compared by eye."""
    ends = [float(h.frame["unix_s"][-1]) - time_zero(record, h) for h in hosts]
    if record.outcome is not None:
        ends.append(record.outcome.ended_unix_s - record.outcome.launched_unix_s)
    figure.update_xaxes(title="seconds since the launch command", range=[0, max(ends)])


def mark_spans(
    figure: go.Figure, record: TrialRecord, host: HostSeries, *, spans: bool = True
) -> None:
    """Shade the spans of the ranks on `host`, and the stretches without samples.

    spans: False shades only the latter, where colours fill the figure.
    """
    start = time_zero(record, host)
    for name, (_, colour) in _SHADES.items() if spans else ():
        span = span_on_host(record, host.host, name)
        if span is not None:
            _shade(figure, span[0] - start, span[1] - start, colour, 0.16)
    for begin, end in host.gaps:
        _shade(figure, begin - start, end - start, _GAP[1], 0.3)
        _break_lines(figure, (begin + end) / 2 - start)


def time_zero(record: TrialRecord, host: HostSeries) -> float:
    """Return the launch of the trial on the clock of `host`."""
    launched = launch_on_host(record, host.host)
    return float(host.frame["unix_s"][0]) if launched is None else launched


def _over_time(
    figure: go.Figure,
    record: TrialRecord,
    hosts: Sequence[HostSeries],
    host: HostSeries,
    title: str,
) -> Chart:
    mark_spans(figure, record, host)
    time_axis(figure, record, hosts)
    return chart(figure, title=title, caption="", height_px=270, legend=True)


def _line(
    figure: go.Figure,
    x: NDArray[np.float32],
    y: NDArray[np.float32],
    name: str,
    line: dict[str, Any],
    *,
    axis: str = "y",
) -> None:
    figure.add_scatter(x=x, y=y, name=name, mode="lines", line=line, yaxis=axis)


def _shade(figure: go.Figure, began_s: float, ended_s: float, colour: str, opacity: float) -> None:
    figure.add_vrect(
        x0=began_s, x1=ended_s, fillcolor=colour, opacity=opacity, line_width=0, layer="below"
    )


def _break_lines(figure: go.Figure, at_s: float) -> None:
    """Insert a missing value, so that no line crosses a gap."""
    for line in figure.select_traces({"type": "scatter"}):
        time, found = np.asarray(line.x), np.asarray(line.y)
        place = int(np.searchsorted(time, at_s))
        line.x = np.insert(time, place, np.float32(at_s))
        line.y = np.insert(found, place, np.float32(np.nan))
