"""Figures of one trial's hosts and ranks over time, all on rank 0's clock.

A figure is left out where the trace does not have its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
import polars as pl
from numpy.typing import NDArray

from paceline.analysis.trial.host_frames import HostSeries, field
from paceline.analysis.trial.reading import TrialRecord
from paceline.analysis.trial.usage import launch_on_host, span_on_host
from paceline.show.report.figures.charts import (
    BLUE,
    GREEN,
    ORANGE,
    PALETTE,
    RED,
    Chart,
    chart,
    thinned,
)

if TYPE_CHECKING:
    from paceline.analysis.trial_analysis import TrialAnalysis

    Curve = tuple[NDArray[np.float32], NDArray[np.float32]]

# spans that are marked behind the curves over time
_SHADES = {
    "imports": ("imports", "#9C8F7A"),
    "data_load": ("data loading", "#C9B458"),
    "restore": ("reading a checkpoint", "#E9A456"),
    "train": ("training", "#56B4E9"),
    "bookkeeping": ("writing results", "#CC79A7"),
}
_GAP = ("no samples: the sidecar was not running", "#B93C00")
_DASHES = ("solid", "dash", "dot", "dashdot")  # by host
_MOST_NAMES = 16  # in a legend
_FEWEST_POINTS = 5  # of a curve of values that are seldom read
_HEIGHT_PX = 250
_LEGEND_LINE_PX = 16  # about three names to a line
_MIB = 2**20
_CORE_SCALE = [[0.0, "rgba(0,114,178,0.06)"], [0.5, "#56B4E9"], [1.0, "#0072B2"]]


@dataclass(frozen=True, slots=True)
class _HostFigure:
    """A figure with the same curves for every host."""

    title: str
    axis: str
    curves: tuple[tuple[str, str, str], ...]  # name, colour, column of the host's frame
    top: float | None = None
    divisor: float = 1.0


_ALL_HOSTS = _HostFigure(
    "All hosts on one clock",
    "% of each host",
    (("CPU", BLUE, "cpu_busy_percent"), ("IOWait", RED, "cpu_iowait_percent")),
    top=102,
)
_SWITCHES = (
    ("voluntary", BLUE, "run_voluntary_context_switches_per_s"),
    ("involuntary", RED, "run_involuntary_context_switches_per_s"),
)
_PRESSURE = (
    ("cpu", BLUE, "pressure_cpu_percent"),
    ("io", RED, "pressure_io_percent"),
    ("memory", GREEN, "pressure_memory_percent"),
)
_BYTES = (
    ("disk read", BLUE, "disk_read_bytes_per_s"),
    ("disk written", ORANGE, "disk_write_bytes_per_s"),
    ("network sent", GREEN, "network_sent_bytes_per_s"),
    ("network received", PALETTE[3], "network_received_bytes_per_s"),
)
_HOST_FIGURES = (
    _HostFigure("Context switches of the run's threads", "per second", _SWITCHES),
    _HostFigure("Pressure: a task waited for", "% of the time", _PRESSURE, top=102),
    _HostFigure("Bytes moved: disks and network", "MB per second", _BYTES, divisor=1e6),
)


def shades(*, gaps: bool = False) -> list[tuple[str, str]]:
    """List the shades behind the curves over time: label and colour."""
    return [*_SHADES.values(), *([_GAP] if gaps else [])]


def resource_charts(record: TrialRecord, hosts: Sequence[HostSeries]) -> list[tuple[Chart, Chart]]:
    """Draw two charts for each host: CPU, RAM and threads; CPU idle and IOWait.

    The first is figure 2 of the paper, the second its figure 5.
    """
    pairs = ((_use_chart(record, hosts, h), _idle_chart(record, hosts, h)) for h in hosts)
    return [(use, idle) for use, idle in pairs if use is not None and idle is not None]


def telemetry_charts(trial: TrialAnalysis, hosts: Sequence[HostSeries]) -> list[Chart]:
    """Draw what the traces contain beside CPU, RAM and threads; [] without traces."""
    if not hosts:
        return []
    record = trial.record
    found = [
        _training(trial, hosts),
        _host_chart(_ALL_HOSTS, record, hosts) if len(hosts) > 1 else None,
        _cores(record, hosts),
        _rank_cpu(record, hosts),
        _rank_memory(record, hosts),
        *(_host_chart(each, record, hosts) for each in _HOST_FIGURES),
        _gpus(record, hosts),
    ]
    return [each for each in found if each is not None]


def curve(
    record: TrialRecord, host: HostSeries, rows: pl.DataFrame, column: str, divisor: float = 1.0
) -> Curve:
    """Return times since the launch and values of the rows that have a value, thinned."""
    if column not in rows.columns:
        return thinned(np.zeros(0)), thinned(np.zeros(0))
    known = rows.filter(pl.col(column).is_not_null())
    time_s = known["unix_s"].to_numpy() - _launched(record, host)
    return thinned(time_s), thinned(known[column].to_numpy() / divisor)


class _OverTime:
    """A figure of one trial over the seconds since its launch."""

    def __init__(self, record: TrialRecord, hosts: Sequence[HostSeries]) -> None:
        self._record, self._hosts = record, hosts
        self.figure = go.Figure()

    def line(
        self, name: str, points: Curve, colour: str, *, dash: str = "solid", axis: str = "y"
    ) -> None:
        """Draw a line; a single point would be invisible, and is left out."""
        x, y = points
        if len(y) >= 2:
            line = {"color": colour, "dash": dash, "width": 1.5}
            self.figure.add_scatter(x=x, y=y, name=name, mode="lines", line=line, yaxis=axis)

    def right_axis(self, title: str, rangemode: str = "normal") -> None:
        """Give the curves of axis y2 an axis on the right side."""
        place = {"overlaying": "y", "side": "right", "showgrid": False, "rangemode": rangemode}
        ticks = {"tickmode": "auto", "nticks": 6}
        self.figure.update_layout(yaxis2={"title": title, **place, **ticks})

    def finished(
        self,
        title: str,
        axis: str | None = None,
        *,
        top: float | None = None,
        host: HostSeries | None = None,
        spans: bool = True,
        height_px: int = _HEIGHT_PX,
        right: int = 24,
    ) -> Chart | None:
        """Complete the figure; None if it has no curve.

        host: whose spans and gaps are shaded, by default the first host's. spans: False shades only
        gaps, where colours fill the figure.
        """
        figure = self.figure
        if not figure.data:
            return None
        if axis is not None:
            limits = {"rangemode": "tozero"} if top is None else {"range": [0, top]}
            figure.update_layout(yaxis={"title": axis, **limits})
        self._mark(self._hosts[0] if host is None else host, spans=spans)
        ends = [float(h.frame["unix_s"][-1]) - _launched(self._record, h) for h in self._hosts]
        if self._record.outcome is not None:
            outcome = self._record.outcome
            ends.append(outcome.ended_unix_s - outcome.launched_unix_s)
        # one range for all figures of a trial, so that they can be compared by eye
        figure.update_xaxes(title="seconds since the launch command", range=[0, max(ends)])
        few = len(figure.data) <= _MOST_NAMES
        height_px += _LEGEND_LINE_PX * max(0, -(-len(figure.data) // 3) - 1) if few else 0
        legend = few and any(t.type == "scatter" for t in figure.data)
        return chart(
            figure, title=title, caption="", height_px=height_px, legend=legend, right=right
        )

    def _mark(self, host: HostSeries, *, spans: bool) -> None:
        start = _launched(self._record, host)
        shaded = [
            (span[0] - start, span[1] - start, colour, 0.16)
            for name, (_, colour) in _SHADES.items()
            if spans and (span := span_on_host(self._record, host.host, name)) is not None
        ]
        for begin, end in host.gaps:
            shaded.append((begin - start, end - start, _GAP[1], 0.3))
            self._break_lines((begin + end) / 2 - start)
        area = {"type": "rect", "yref": "y domain", "y0": 0, "y1": 1, "line_width": 0}
        self.figure.update_layout(
            shapes=[
                {**area, "layer": "below", "x0": x0, "x1": x1, "fillcolor": colour, "opacity": pale}
                for x0, x1, colour, pale in shaded
            ]
        )

    def _break_lines(self, at_s: float) -> None:
        """Insert a missing value, so that no line crosses a gap."""
        for line in self.figure.select_traces({"type": "scatter"}):
            time, found = np.asarray(line.x), np.asarray(line.y)
            place = int(np.searchsorted(time, at_s))
            line.x = np.insert(time, place, np.float32(at_s))
            line.y = np.insert(found, place, np.float32(np.nan))


def _use_chart(record: TrialRecord, hosts: Sequence[HostSeries], host: HostSeries) -> Chart | None:
    drawn = _OverTime(record, hosts)
    drawn.line("CPU (%)", curve(record, host, host.frame, "cpu_busy_percent"), BLUE)
    drawn.line("RAM (%)", curve(record, host, host.frame, "ram_percent"), GREEN)
    threads = curve(record, host, host.frame, "run_threads")
    drawn.line("threads of the run (right)", threads, ORANGE, dash="dot", axis="y2")
    drawn.right_axis("threads", "tozero")
    title = f"CPU, RAM, threads on {host.host}"
    return drawn.finished(title, "% of the host", top=102, host=host)


def _idle_chart(record: TrialRecord, hosts: Sequence[HostSeries], host: HostSeries) -> Chart | None:
    drawn = _OverTime(record, hosts)
    drawn.line("CPU idle (%)", curve(record, host, host.frame, "cpu_idle_percent"), BLUE)
    drawn.line("IOWait (%)", curve(record, host, host.frame, "cpu_iowait_percent"), RED)
    title = f"CPU idle and IOWait on {host.host}"
    return drawn.finished(title, "% of the host's CPU time", top=102, host=host)


def _training(trial: TrialAnalysis, hosts: Sequence[HostSeries]) -> Chart | None:
    steps, outcome = trial.steps, trial.record.outcome
    if outcome is None or len(steps.step) < 2:
        return None
    time_s = thinned(steps.ended_unix_s - outcome.launched_unix_s)
    speed = thinned(steps.samples / np.maximum(steps.time_s, 1e-9))
    unit = "samples" if steps.samples_known else "steps"
    drawn = _OverTime(trial.record, hosts)
    drawn.line(f"{unit}/s", (time_s, speed), BLUE)
    drawn.line("loss (right)", (time_s, thinned(steps.loss)), ORANGE, axis="y2")
    drawn.right_axis("loss")
    return drawn.finished("Training: speed and loss", f"{unit} per second", right=64)


def _host_chart(of: _HostFigure, record: TrialRecord, hosts: Sequence[HostSeries]) -> Chart | None:
    drawn = _OverTime(record, hosts)
    for host, dash in zip(hosts, cycle(_DASHES), strict=False):
        for name, colour, column in of.curves:
            points = curve(record, host, host.frame, column, of.divisor)
            drawn.line(f"{name}{_on(host, hosts)}", points, colour, dash=dash)
    return drawn.finished(of.title, of.axis, top=of.top)


def _cores(record: TrialRecord, hosts: Sequence[HostSeries]) -> Chart | None:
    drawn = _OverTime(record, hosts)
    labels: list[str] = []
    for host in hosts:
        percent = pl.col("core_busy_percent")
        busy = host.frame.filter(percent.list.get(0, null_on_oob=True).is_not_null())
        cores = busy.select(percent.list.len().min()).item() or 0
        if not cores:
            continue
        by_core = [busy.select(percent.list.get(core)).to_series() for core in range(cores)]
        drawn.figure.add_heatmap(
            x=thinned(busy["unix_s"].to_numpy() - _launched(record, host)),
            y=list(range(len(labels), len(labels) + cores)),
            z=np.stack([thinned(core.to_numpy()) for core in by_core]),
            coloraxis="coloraxis",
            hovertemplate=f"row %{{y}}, {host.host}<br>%{{x:.1f}} s<br>%{{z:.0f}} % busy"
            "<extra></extra>",
        )
        labels += [f"core {core}{_on(host, hosts)}" for core in range(cores)]
    scale = {"cmin": 0, "cmax": 100, "colorscale": _CORE_SCALE}
    title = {"text": "% busy", "side": "right"}
    bar = {"title": title, "thickness": 10, "outlinewidth": 0, "tickvals": [0, 50, 100]}
    drawn.figure.update_layout(coloraxis={**scale, "colorbar": bar})
    named = range(0, len(labels), -(-len(labels) // _MOST_NAMES) or 1)
    drawn.figure.update_yaxes(
        tickvals=list(named),
        ticktext=[labels[n] for n in named],
        range=[len(labels) - 0.5, -0.5],
        showgrid=False,
    )
    height_px = max(_HEIGHT_PX, 70 + min(12 * 32, 24 * len(labels)))
    return drawn.finished("Each core", height_px=height_px, spans=False)


def _rank_cpu(record: TrialRecord, hosts: Sequence[HostSeries]) -> Chart | None:
    drawn = _OverTime(record, hosts)
    for rank, colour, host, rows in _by_rank(hosts):
        drawn.line(f"rank {rank}", curve(record, host, rows, "cpu_percent"), colour)
    return drawn.finished("CPU of each rank", "% of one core")


def _rank_memory(record: TrialRecord, hosts: Sequence[HostSeries]) -> Chart | None:
    """Draw the proportional set size if it was read often enough for a curve."""
    ranks = list(_by_rank(hosts))
    read = [rows["pss_bytes"].count() for *_, rows in ranks]
    proportional = min(read, default=0) >= _FEWEST_POINTS
    column = "pss_bytes" if proportional else "rss_bytes"
    drawn = _OverTime(record, hosts)
    for rank, colour, host, rows in ranks:
        drawn.line(f"rank {rank}", curve(record, host, rows, column, _MIB), colour)
    kind = "proportional: shared pages count once" if proportional else "resident"
    return drawn.finished(f"Memory of each rank ({kind})", "MiB")


def _gpus(record: TrialRecord, hosts: Sequence[HostSeries]) -> Chart | None:
    drawn = _OverTime(record, hosts)
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
            drawn.line(label, curve(record, host, rows, "used"), next(colours))
    return drawn.finished("GPUs: a kernel ran", "% of the time", top=102)


def _by_rank(hosts: Sequence[HostSeries]) -> Iterator[tuple[int, str, HostSeries, pl.DataFrame]]:
    """Yield each rank in order with its colour, host and rows."""
    found = [
        (rank, host, host.ranks.filter(pl.col("rank") == rank))
        for host in hosts
        if not host.ranks.is_empty()
        for rank in host.ranks["rank"].unique().to_list()
    ]
    in_order = sorted(found, key=lambda each: each[0])
    for (rank, host, rows), colour in zip(in_order, cycle(PALETTE), strict=False):
        yield rank, colour, host, rows


def _on(host: HostSeries, hosts: Sequence[HostSeries]) -> str:
    return f" on {host.host}" if len(hosts) > 1 else ""


def _launched(record: TrialRecord, host: HostSeries) -> float:
    """Return the launch of the trial on the clock of `host`; without it the first sample."""
    launched = launch_on_host(record, host.host)
    return float(host.frame["unix_s"][0]) if launched is None else launched
