"""Figures of one trial's hosts and ranks over time, all on rank 0's clock.

What a trace does not have (an old one, or a system that does not say) has no figure.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, cycle
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from paceline.analysis.host_curves import rates
from paceline.analysis.usage import busy_percent, iowait_percent
from paceline.report.figures.charts import (
    BLUE,
    GREEN,
    ORANGE,
    PALETTE,
    RED,
    chart,
    curve,
    thinned,
)
from paceline.report.figures.usage import mark_spans, time_axis, time_zero

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from paceline.analysis.comparison import TrialAnalysis
    from paceline.analysis.reading import HostTrace
    from paceline.records.rows import HostSample, RankSample
    from paceline.report.figures.charts import Chart

_DASHES = ("solid", "dash", "dot", "dashdot")  # by host
_MOST_NAMES = 16  # in a legend
_FEWEST_POINTS = 5  # of a curve of what is seldom read
_HEIGHT_PX = 250
_LEGEND_LINE_PX = 16  # about three names to a line
_MEGA = 1e6
_MIB = 2**20
_CORE_SCALE = [[0.0, "rgba(0,114,178,0.06)"], [0.5, "#56B4E9"], [1.0, "#0072B2"]]


def telemetry_charts(trial: TrialAnalysis) -> list[Chart]:
    """What one trial's traces tell beside CPU, RAM and threads of each host; [] without traces."""
    hosts = [host for host in trial.record.hosts if host.samples]
    if not hosts:
        return []
    figures = (
        _training(trial),
        _hosts(trial, hosts) if len(hosts) > 1 else None,
        _cores(trial, hosts),
        _rank_cpu(trial, hosts),
        _rank_memory(trial, hosts),
        _switches(trial, hosts),
        _pressure(trial, hosts),
        _devices(trial, hosts),
        _gpus(trial, hosts),
    )
    return [figure for figure in figures if figure is not None]


def _training(trial: TrialAnalysis) -> Chart | None:
    steps, outcome = trial.steps, trial.record.outcome
    if outcome is None or len(steps.step) < 2:
        return None
    time = thinned(steps.ended_unix_s - outcome.launched_unix_s)
    speed = steps.samples / np.maximum(steps.time_s, 1e-9)
    figure = go.Figure()
    _line(figure, time, thinned(speed), "images/s", BLUE)
    _line(figure, time, thinned(steps.loss), "loss (right)", ORANGE, axis="y2")
    figure.update_yaxes(title="images a second", rangemode="tozero")
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
    return _over_time(figure, trial, trial.record.hosts[0], "Training: speed and loss", right=64)


def _hosts(trial: TrialAnalysis, hosts: Sequence[HostTrace]) -> Chart:
    figure = go.Figure()
    for host, dash in zip(hosts, cycle(_DASHES), strict=False):
        time = _times(trial, host, host.samples)
        for name, colour, value in (("CPU", BLUE, busy_percent), ("IOWait", RED, iowait_percent)):
            values = curve(value(s) for s in host.samples)
            _line(figure, time, values, f"{name} on {host.host}", colour, dash=dash)
    figure.update_yaxes(title="% of each host", range=[0, 102])
    return _over_time(figure, trial, hosts[0], "All hosts on one clock")


def _cores(trial: TrialAnalysis, hosts: Sequence[HostTrace]) -> Chart | None:
    figure = go.Figure()
    labels: list[str] = []
    for host in hosts:
        samples = [s for s in host.samples if s.core_busy_percent]
        cores = min((len(s.core_busy_percent) for s in samples), default=0)
        if not cores:
            continue
        busy = [curve(s.core_busy_percent[core] for s in samples) for core in range(cores)]
        names = [f"core {core}{_on(host, hosts)}" for core in range(cores)]
        figure.add_heatmap(
            x=_times(trial, host, samples),
            y=list(range(len(labels), len(labels) + cores)),
            z=np.stack(busy),
            text=[[name] * len(busy[0]) for name in names],
            coloraxis="coloraxis",
            hovertemplate="%{text}<br>%{x:.1f} s<br>%{z:.0f} % busy<extra></extra>",
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
    return _over_time(figure, trial, hosts[0], "Each core", height_px=height_px, spans=False)


def _rank_cpu(trial: TrialAnalysis, hosts: Sequence[HostTrace]) -> Chart | None:
    figure = go.Figure()
    for rank, colour, host, samples in _by_rank(hosts):
        values = curve(s.cpu_percent for s in samples)
        _line(figure, _times(trial, host, samples), values, f"rank {rank}", colour)
    if not figure.data:
        return None
    figure.update_yaxes(title="% of one core", rangemode="tozero")
    return _over_time(figure, trial, hosts[0], "CPU of each rank")


def _rank_memory(trial: TrialAnalysis, hosts: Sequence[HostTrace]) -> Chart | None:
    """The proportional set size at the ticks that read it, if they are enough for a curve."""
    found = [[s for s in samples if s.pss_bytes is not None] for *_, samples in _by_rank(hosts)]
    proportional = min(map(len, found), default=0) >= _FEWEST_POINTS
    figure = go.Figure()
    for rank, colour, host, samples in _by_rank(hosts):
        kept = [s for s in samples if s.pss_bytes is not None] if proportional else samples
        held = (s.pss_bytes if proportional else s.rss_bytes for s in kept)
        values = curve(None if v is None else v / _MIB for v in held)
        _line(figure, _times(trial, host, kept), values, f"rank {rank}", colour)
    if not figure.data:
        return None
    figure.update_yaxes(title="MiB", rangemode="tozero")
    kind = "proportional: shared pages count once" if proportional else "resident"
    return _over_time(figure, trial, hosts[0], f"Memory of each rank ({kind})")


def _switches(trial: TrialAnalysis, hosts: Sequence[HostTrace]) -> Chart | None:
    kinds: tuple[tuple[str, str, Callable[[HostSample], float]], ...] = (
        ("voluntary", BLUE, lambda s: s.run_voluntary_context_switches),
        ("involuntary", RED, lambda s: s.run_involuntary_context_switches),
    )
    figure = go.Figure()
    for host, dash in zip(hosts, cycle(_DASHES), strict=False):
        for name, colour, counter in kinds:
            points = _known(trial, host, rates(host.samples, counter, seldom=True))
            _line(figure, *points, f"{name}{_on(host, hosts)}", colour, dash=dash)
    if not figure.data:
        return None
    figure.update_yaxes(title="a second", rangemode="tozero")
    return _over_time(figure, trial, hosts[0], "Context switches of the run's threads")


def _pressure(trial: TrialAnalysis, hosts: Sequence[HostTrace]) -> Chart | None:
    figure = go.Figure()
    for host, dash in zip(hosts, cycle(_DASHES), strict=False):
        names = sorted({name for sample in host.samples for name in sample.pressure})
        for resource, colour in zip(names, (BLUE, RED, GREEN), strict=False):
            waited = rates(host.samples, partial(_some_s, resource=resource))
            points = _known(trial, host, [None if w is None else 100 * w for w in waited])
            _line(figure, *points, f"{resource}{_on(host, hosts)}", colour, dash=dash)
    if not figure.data:
        return None
    figure.update_yaxes(title="% of the time", range=[0, 102])
    return _over_time(figure, trial, hosts[0], "Pressure: a task waited for")


def _some_s(sample: HostSample, resource: str) -> float | None:
    found = sample.pressure.get(resource)
    return None if found is None else found.some_s


def _devices(trial: TrialAnalysis, hosts: Sequence[HostTrace]) -> Chart | None:
    counters: tuple[tuple[str, str, Callable[[HostSample], float | None]], ...] = (
        ("disk read", BLUE, lambda s: s.disk_read_bytes),
        ("disk written", ORANGE, lambda s: s.disk_write_bytes),
        ("network sent", GREEN, lambda s: s.network_sent_bytes),
        ("network received", PALETTE[3], lambda s: s.network_received_bytes),
    )
    figure = go.Figure()
    for host, dash in zip(hosts, cycle(_DASHES), strict=False):
        for name, colour, counter in counters:
            moved = rates(host.samples, counter)
            points = _known(trial, host, [None if v is None else v / _MEGA for v in moved])
            _line(figure, *points, f"{name}{_on(host, hosts)}", colour, dash=dash)
    if not figure.data:
        return None
    figure.update_yaxes(title="MB a second", rangemode="tozero")
    return _over_time(figure, trial, hosts[0], "Bytes moved: disks and network")


def _gpus(trial: TrialAnalysis, hosts: Sequence[HostTrace]) -> Chart | None:
    figure = go.Figure()
    colours = cycle(PALETTE)
    for host in hosts:
        for number in range(max(len(s.gpus) for s in host.samples)):
            used = [
                s.gpus[number].utilization_percent if number < len(s.gpus) else None
                for s in host.samples
            ]
            points = _known(trial, host, used)
            _line(figure, *points, f"GPU {number}{_on(host, hosts)}", next(colours))
    if not figure.data:
        return None
    figure.update_yaxes(title="% of the time", range=[0, 102])
    return _over_time(figure, trial, hosts[0], "GPUs: a kernel ran")


def _by_rank(
    hosts: Sequence[HostTrace],
) -> Iterator[tuple[int, str, HostTrace, list[RankSample]]]:
    """Each rank in order with its colour, host and samples."""
    found: dict[int, tuple[HostTrace, list[RankSample]]] = {}
    for host, sample in chain.from_iterable(((h, s) for s in h.ranks) for h in hosts):
        found.setdefault(sample.rank, (host, []))[1].append(sample)
    for (rank, (host, samples)), colour in zip(
        sorted(found.items(), key=lambda item: item[0]), cycle(PALETTE), strict=False
    ):
        yield rank, colour, host, samples


def _times(
    trial: TrialAnalysis, host: HostTrace, samples: Sequence[HostSample] | Sequence[RankSample]
) -> NDArray[np.float32]:
    start = time_zero(trial.record, host)
    return thinned(np.array([s.unix_s - start for s in samples]))


def _known(
    trial: TrialAnalysis, host: HostTrace, values: Sequence[float | None]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Times and values of the samples that have one, so that a line joins them."""
    pairs = [(s, v) for s, v in zip(host.samples, values, strict=True) if v is not None]
    return _times(trial, host, [s for s, _ in pairs]), curve(v for _, v in pairs)


def _on(host: HostTrace, hosts: Sequence[HostTrace]) -> str:
    return f" on {host.host}" if len(hosts) > 1 else ""


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
    """Nothing to see, no line: what was measured less than twice needs no name either."""
    if np.count_nonzero(~np.isnan(y)) >= 2:
        line = {"color": colour, "dash": dash, "width": 1.5}
        figure.add_scatter(x=x, y=y, name=name, mode="lines", line=line, yaxis=axis)


def _over_time(
    figure: go.Figure,
    trial: TrialAnalysis,
    host: HostTrace,
    title: str,
    *,
    height_px: int = _HEIGHT_PX,
    spans: bool = True,
    right: int = 24,
) -> Chart:
    mark_spans(figure, trial.record, host, spans=spans)
    time_axis(figure, trial.record)
    few = len(figure.data) <= _MOST_NAMES
    height_px += _LEGEND_LINE_PX * max(0, -(-len(figure.data) // 3) - 1) if few else 0
    legend = few and any(t.type == "scatter" for t in figure.data)
    return chart(figure, title=title, caption="", height_px=height_px, legend=legend, right=right)
