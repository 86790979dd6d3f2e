"""Figures of one trial's hosts and ranks over time, all on rank 0's clock.

A figure is left out where the trace does not have its values.
"""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
import polars as pl

from paceline.analysis.host_frames import field, struct_fields
from paceline.report.figures.charts import BLUE, GREEN, ORANGE, PALETTE, RED, chart, thinned
from paceline.report.figures.usage import mark_spans, time_axis, time_zero, times, values

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from paceline.analysis.host_frames import HostSeries
    from paceline.analysis.trial_analysis import TrialAnalysis
    from paceline.report.figures.charts import Chart

_DASHES = ("solid", "dash", "dot", "dashdot")  # by host
_MOST_NAMES = 16  # in a legend
_FEWEST_POINTS = 5  # of a curve of values that are seldom read
_HEIGHT_PX = 250
_LEGEND_LINE_PX = 16  # about three names to a line
_MEGA = 1e6
_MIB = 2**20
_CORE_SCALE = [[0.0, "rgba(0,114,178,0.06)"], [0.5, "#56B4E9"], [1.0, "#0072B2"]]


def telemetry_charts(trial: TrialAnalysis, hosts: Sequence[HostSeries]) -> list[Chart]:
    """Draw what the traces contain beside CPU, RAM and threads; [] without traces."""
    if not hosts:
        return []
    figures = (
        _training(trial, hosts),
        _hosts(trial, hosts) if len(hosts) > 1 else None,
        _cores(trial, hosts),
        _rank_cpu(trial, hosts),
        _rank_memory(trial, hosts),
        _context_switches(trial, hosts),
        _pressure(trial, hosts),
        _devices(trial, hosts),
        _gpus(trial, hosts),
    )
    return [figure for figure in figures if figure is not None]


def _training(trial: TrialAnalysis, hosts: Sequence[HostSeries]) -> Chart | None:
    steps, outcome = trial.steps, trial.record.outcome
    if outcome is None or len(steps.step) < 2:
        return None
    time = thinned(steps.ended_unix_s - outcome.launched_unix_s)
    speed = steps.samples / np.maximum(steps.time_s, 1e-9)
    figure = go.Figure()
    _line(figure, time, thinned(speed), "samples/s", BLUE)
    _line(figure, time, thinned(steps.loss), "loss (right)", ORANGE, axis="y2")
    figure.update_yaxes(title="samples per second", rangemode="tozero")
    figure.update_layout(
        yaxis2={
            "title": "loss",
            "overlaying": "y",
            "side": "right",
            "showgrid": False,
            "tickmode": "auto",
            "nticks": 5,
        }
    )
    return _over_time(figure, trial, hosts, "Training: speed and loss", right=64)


def _hosts(trial: TrialAnalysis, hosts: Sequence[HostSeries]) -> Chart | None:
    curves = (("CPU", BLUE, "cpu_busy_percent"), ("IOWait", RED, "cpu_iowait_percent"))
    figure = go.Figure()
    for host, dash in zip(hosts, cycle(_DASHES), strict=False):
        time = times(trial.record, host)
        for name, colour, column in curves:
            _line(figure, time, values(host, column), f"{name} on {host.host}", colour, dash=dash)
    return _finished(figure, trial, hosts, "All hosts on one clock", "% of each host", top=102)


def _cores(trial: TrialAnalysis, hosts: Sequence[HostSeries]) -> Chart | None:
    figure = go.Figure()
    labels: list[str] = []
    for host in hosts:
        busy = host.frame.filter(
            pl.col("core_busy_percent").list.get(0, null_on_oob=True).is_not_null()
        )
        cores = busy["core_busy_percent"].list.len().min() or 0
        if not isinstance(cores, int) or not cores:
            continue
        start = time_zero(trial.record, host)
        names = [f"core {core}{_on(host, hosts)}" for core in range(cores)]
        time = thinned(busy["unix_s"].to_numpy() - start)
        figure.add_heatmap(
            x=time,
            y=list(range(len(labels), len(labels) + cores)),
            z=np.stack(
                [
                    thinned(busy["core_busy_percent"].list.get(core).to_numpy())
                    for core in range(cores)
                ]
            ),
            coloraxis="coloraxis",
            hovertemplate=f"row %{{y}}, {host.host}<br>%{{x:.1f}} s<br>%{{z:.0f}} % busy"
            "<extra></extra>",
        )
        labels += names
    if not labels:
        return None
    scale = {"cmin": 0, "cmax": 100, "colorscale": _CORE_SCALE}
    title = {"text": "% busy", "side": "right"}
    bar = {"title": title, "thickness": 10, "outlinewidth": 0, "tickvals": [0, 50, 100]}
    figure.update_layout(coloraxis={**scale, "colorbar": bar})
    named = range(0, len(labels), -(-len(labels) // _MOST_NAMES))
    figure.update_yaxes(
        tickvals=list(named),
        ticktext=[labels[n] for n in named],
        range=[len(labels) - 0.5, -0.5],
        showgrid=False,
    )
    height_px = max(_HEIGHT_PX, 70 + min(12 * 32, 24 * len(labels)))
    return _over_time(figure, trial, hosts, "Each core", height_px=height_px, spans=False)


def _rank_cpu(trial: TrialAnalysis, hosts: Sequence[HostSeries]) -> Chart | None:
    figure = go.Figure()
    for rank, colour, host, rows in _by_rank(hosts):
        _points(figure, trial, host, rows, "cpu_percent", f"rank {rank}", colour)
    return _finished(figure, trial, hosts, "CPU of each rank", "% of one core")


def _rank_memory(trial: TrialAnalysis, hosts: Sequence[HostSeries]) -> Chart | None:
    """Draw the proportional set size if it was read often enough for a curve."""
    ranks = list(_by_rank(hosts))
    read = [rows["pss_bytes"].count() for *_, rows in ranks]
    proportional = min(read, default=0) >= _FEWEST_POINTS
    column = "pss_bytes" if proportional else "rss_bytes"
    figure = go.Figure()
    for rank, colour, host, rows in ranks:
        mebibytes = rows.with_columns(pl.col(column) / _MIB)
        _points(figure, trial, host, mebibytes, column, f"rank {rank}", colour)
    kind = "proportional: shared pages count once" if proportional else "resident"
    return _finished(figure, trial, hosts, f"Memory of each rank ({kind})", "MiB")


def _context_switches(trial: TrialAnalysis, hosts: Sequence[HostSeries]) -> Chart | None:
    curves = (
        ("voluntary", BLUE, "run_voluntary_context_switches_per_s"),
        ("involuntary", RED, "run_involuntary_context_switches_per_s"),
    )
    figure = go.Figure()
    for host, dash in zip(hosts, cycle(_DASHES), strict=False):
        for name, colour, column in curves:
            label = f"{name}{_on(host, hosts)}"
            _points(figure, trial, host, host.frame, column, label, colour, dash=dash)
    return _finished(figure, trial, hosts, "Context switches of the run's threads", "per second")


def _pressure(trial: TrialAnalysis, hosts: Sequence[HostSeries]) -> Chart | None:
    figure = go.Figure()
    for host, dash in zip(hosts, cycle(_DASHES), strict=False):
        resources = sorted(struct_fields(host.frame, "pressure"))
        for resource, colour in zip(resources, (BLUE, RED, GREEN), strict=False):
            column, label = f"pressure_{resource}_percent", f"{resource}{_on(host, hosts)}"
            _points(figure, trial, host, host.frame, column, label, colour, dash=dash)
    title = "Pressure: a task waited for"
    return _finished(figure, trial, hosts, title, "% of the time", top=102)


def _devices(trial: TrialAnalysis, hosts: Sequence[HostSeries]) -> Chart | None:
    curves = (
        ("disk read", BLUE, "disk_read_bytes_per_s"),
        ("disk written", ORANGE, "disk_write_bytes_per_s"),
        ("network sent", GREEN, "network_sent_bytes_per_s"),
        ("network received", PALETTE[3], "network_received_bytes_per_s"),
    )
    figure = go.Figure()
    for host, dash in zip(hosts, cycle(_DASHES), strict=False):
        for name, colour, column in curves:
            rows = host.frame.with_columns(pl.col(column) / _MEGA)
            _points(
                figure, trial, host, rows, column, f"{name}{_on(host, hosts)}", colour, dash=dash
            )
    title = "Bytes moved: disks and network"
    return _finished(figure, trial, hosts, title, "MB per second")


def _gpus(trial: TrialAnalysis, hosts: Sequence[HostSeries]) -> Chart | None:
    figure = go.Figure()
    colours = cycle(PALETTE)
    for host in hosts:
        if not isinstance(host.frame.schema.get("gpus"), pl.List):
            continue
        most = host.frame["gpus"].list.len().max()
        for number in range(most if isinstance(most, int) else 0):
            used = pl.col("gpus").list.get(number, null_on_oob=True)
            rows = host.frame.with_columns(used.alias("gpu")).with_columns(
                (100 * field("gpu", "utilization_ratio")).alias("used")
            )
            label = f"GPU {number}{_on(host, hosts)}"
            _points(figure, trial, host, rows, "used", label, next(colours))
    return _finished(figure, trial, hosts, "GPUs: a kernel ran", "% of the time", top=102)


def _by_rank(hosts: Sequence[HostSeries]) -> Iterator[tuple[int, str, HostSeries, pl.DataFrame]]:
    """Yield each rank in order with its colour, host and rows."""
    found = [
        (rank, host, host.ranks.filter(pl.col("rank") == rank))
        for host in hosts
        if not host.ranks.is_empty()
        for rank in host.ranks["rank"].unique().sort().to_list()
    ]
    for (rank, host, rows), colour in zip(
        sorted(found, key=lambda each: each[0]), cycle(PALETTE), strict=False
    ):
        yield rank, colour, host, rows


def _on(host: HostSeries, hosts: Sequence[HostSeries]) -> str:
    return f" on {host.host}" if len(hosts) > 1 else ""


def _points(  # noqa: PLR0913  (one curve)
    figure: go.Figure,
    trial: TrialAnalysis,
    host: HostSeries,
    rows: pl.DataFrame,
    column: str,
    name: str,
    colour: str,
    *,
    dash: str = "solid",
) -> None:
    """Draw a line through the rows that have a value."""
    if column not in rows.columns:
        return
    known = rows.filter(pl.col(column).is_not_null())
    time = thinned(known["unix_s"].to_numpy() - time_zero(trial.record, host))
    _line(figure, time, thinned(known[column].to_numpy()), name, colour, dash=dash)


def _line(
    figure: go.Figure,
    x: NDArray[np.float32],
    y: NDArray[np.float32],
    name: str,
    colour: str,
    *,
    dash: str = "solid",
    axis: str = "y",
) -> None:
    """Draw a line; a single point would be invisible, and is left out."""
    if np.count_nonzero(~np.isnan(y)) >= 2:
        line = {"color": colour, "dash": dash, "width": 1.5}
        figure.add_scatter(x=x, y=y, name=name, mode="lines", line=line, yaxis=axis)


def _finished(
    figure: go.Figure,
    trial: TrialAnalysis,
    hosts: Sequence[HostSeries],
    title: str,
    axis: str,
    *,
    top: float | None = None,
) -> Chart | None:
    """Complete a figure of lines; None if it has none."""
    if not figure.data:
        return None
    if top is None:
        figure.update_yaxes(title=axis, rangemode="tozero")
    else:
        figure.update_yaxes(title=axis, range=[0, top])
    return _over_time(figure, trial, hosts, title)


def _over_time(
    figure: go.Figure,
    trial: TrialAnalysis,
    hosts: Sequence[HostSeries],
    title: str,
    *,
    height_px: int = _HEIGHT_PX,
    spans: bool = True,
    right: int = 24,
) -> Chart:
    mark_spans(figure, trial.record, hosts[0], spans=spans)
    time_axis(figure, trial.record, hosts)
    few = len(figure.data) <= _MOST_NAMES
    height_px += _LEGEND_LINE_PX * max(0, -(-len(figure.data) // 3) - 1) if few else 0
    legend = few and any(t.type == "scatter" for t in figure.data)
    return chart(figure, title=title, caption="", height_px=height_px, legend=legend, right=right)
