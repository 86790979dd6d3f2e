"""The report's figures, as Plotly figures in JSON; the only module that knows Plotly.

Colours are those of Okabe and Ito (Color Universal Design, 2008), which people with any kind of
colour blindness can tell apart; a configuration has one colour in every figure. Text and grid
colours are left to the page, which knows whether it is light or dark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from paceline.analysis.phases import PHASES, STEP_PHASES
from paceline.analysis.usage import (
    busy_percent,
    iowait_percent,
    launch_on_host,
    ram_percent,
    span_on_host,
)
from paceline.report.paper import paper_speedup
from paceline.report.wording import NOT_MEASURED, PHASE_WORDS, short_name, with_bounds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from paceline.analysis.comparison import Comparison, Row, TrialAnalysis
    from paceline.analysis.phases import Phases
    from paceline.analysis.reading import HostTrace, TrialRecord

_POINTS = 600  # of a curve: more cannot be seen, and would make the page heavy
_PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#B8A900", "#999999")
_BLUE, _GREEN, _ORANGE, _RED = _PALETTE[0], _PALETTE[2], _PALETTE[1], _PALETTE[4]
_PHASE_COLOURS = {
    "launch": "#6E6E6E",
    "imports": "#9C8F7A",
    "data_load": "#C9B458",
    "data_wait": "#F0E442",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "comm_wait": "#E69F00",
    "comm_transfer": "#D55E00",
    "optimizer": "#009E73",
    "other": "#C8C8C8",
    "teardown": "#3F3F3F",
}
# spans that are marked behind the curves over time
_SHADES = {
    "imports": ("imports", "#9C8F7A"),
    "data_load": ("data loading", "#C9B458"),
    "train": ("training", "#56B4E9"),
    "bookkeeping": ("writing results", "#CC79A7"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure for the page: Plotly's JSON, its height in pixels, and what it shows in words."""

    json: str
    height_px: int
    title: str
    caption: str


def plotly_js() -> str:
    """Plotly's library, to be put into the page once (MIT licence, stated in its text)."""
    script: str = get_plotlyjs()
    return script


def colours(comparison: Comparison) -> dict[str, str]:
    """A colour for each configuration, the same for its way of running in every workload."""
    ways = sorted({_way(row) for row in comparison.rows})
    by_way = {way: _PALETTE[i % len(_PALETTE)] for i, way in enumerate(ways)}
    return {row.configuration: by_way[_way(row)] for row in comparison.rows}


def shades() -> list[tuple[str, str]]:
    """What the shades behind the curves over time mean: words and colour."""
    return list(_SHADES.values())


def speedup_chart(comparison: Comparison, workload: str) -> Chart:
    """Speedups with their intervals; the paper's are written beside, its machines were others."""
    rows = [r for r in comparison.rows_of(workload) if r.speedup is not None][::-1]
    palette = colours(comparison)
    figure = go.Figure(
        go.Bar(
            orientation="h",
            y=[short_name(r) for r in rows],
            x=[r.speedup.median for r in rows if r.speedup],
            marker={
                "color": [palette[r.configuration] for r in rows],
                "opacity": [1 if r.ranked else 0.35 for r in rows],
            },
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [r.speedup.high - r.speedup.median for r in rows if r.speedup],
                "arrayminus": [r.speedup.median - r.speedup.low for r in rows if r.speedup],
                "thickness": 1.5,
                "color": "#888888",
            },
            customdata=[with_bounds(r.speedup) for r in rows],
            hovertemplate="%{y}<br>%{customdata}<extra></extra>",
        )
    )
    most = max((r.speedup.high for r in rows if r.speedup), default=1.0)
    for row in rows:
        figure.add_annotation(
            x=1.0,
            xref="paper",
            y=short_name(row),
            xanchor="left",
            xshift=8,
            text=_speedup_label(row),
            showarrow=False,
        )
    figure.add_vline(x=1, line={"dash": "dot", "width": 1, "color": "#888888"})
    figure.update_xaxes(title="speedup over sequential (times)", range=[0, most * 1.05])
    return _chart(
        figure,
        title=f"Speedup, {workload}",
        caption="Bars: median; lines: 95 % interval. Pale bars are not ranked (not shown to be "
        "the same training). The paper's numbers come from other machines.",
        height_px=110 + 34 * len(rows),
        right=210,
    )


def rank_time_chart(comparison: Comparison, workload: str) -> Chart:
    """Time of each rank of each configuration's first repeat, launch command to exit."""
    bars = [
        (f"{short_name(row)}  r{rank.rank}", rank.whole)
        for row, trial in _first_repeats(comparison, workload)
        for rank in trial.phases
    ]
    figure = _stacked(bars, PHASES, "seconds from the launch command to its exit")
    return _chart(
        figure,
        title=f"Where the time went, {workload}",
        caption="One bar a rank (r0, r1, ...), first repeat; the parts add up to the whole.",
        height_px=170 + 26 * len(bars),
        legend=True,
    )


def step_time_chart(comparison: Comparison, workload: str) -> Chart:
    """A mean steady step of each rank."""
    bars = [
        (f"{short_name(row)}  r{rank.rank}", rank.step)
        for row, trial in _first_repeats(comparison, workload)
        for rank in trial.phases
    ]
    figure = _stacked(bars, STEP_PHASES, "seconds a step, mean after the warm-up")
    return _chart(
        figure,
        title=f"A step after the warm-up, {workload}",
        caption="One bar a rank, first repeat. Waiting for the slowest rank is not transfer.",
        height_px=170 + 26 * len(bars),
        legend=True,
    )


def step_distribution_chart(comparison: Comparison, workload: str) -> Chart:
    """Times of all steady steps of all repeats."""
    palette = colours(comparison)
    figure = go.Figure()
    rows = comparison.rows_of(workload)[::-1]
    for row in rows:
        values = [
            t.steps.time_s[t.steps.steady(t.record.trial.training.warmup_steps)]
            for t in comparison.trials[row.configuration]
        ]
        figure.add_box(
            x=_thinned(np.concatenate(values)),
            name=short_name(row),
            orientation="h",
            marker={"color": palette[row.configuration], "size": 3},
            line={"width": 1.5},
            boxpoints="outliers",
        )
    figure.update_xaxes(title="seconds a global step", rangemode="tozero")
    return _chart(
        figure,
        title=f"Step times, {workload}",
        caption="All steps after the warm-up of all repeats: median, quartiles, 1.5 times their "
        "distance, and what lies beyond.",
        height_px=110 + 34 * len(rows),
    )


def loss_chart(comparison: Comparison, workload: str) -> Chart:
    """Global loss a step; curves of the same training lie on one another."""
    palette = colours(comparison)
    figure = go.Figure()
    curves = _first_repeats(comparison, workload)
    for number, (row, trial) in enumerate(curves):
        figure.add_scatter(
            x=_thinned(trial.steps.step),
            y=_thinned(trial.steps.loss),
            name=short_name(row),
            mode="lines",
            # wide first, narrow last: curves that coincide all show
            line={
                "color": palette[row.configuration],
                "width": 2 + 2.0 * (len(curves) - 1 - number) / max(1, len(curves) - 1) * 2,
            },
        )
    figure.update_xaxes(title="global step")
    figure.update_yaxes(title="loss (cross entropy, mean of the global batch)")
    return _chart(
        figure,
        title=f"Loss, {workload}",
        caption=_loss_caption([trial for _, trial in curves]),
        height_px=380,
        legend=True,
    )


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
    start = _time_zero(record, host)
    time = _thinned(np.array([s.unix_s - start for s in host.samples]))
    figure = go.Figure()
    curves = (
        ("CPU", _BLUE, [busy_percent(s) for s in host.samples]),
        ("RAM", _GREEN, [ram_percent(s) for s in host.samples]),
    )
    for name, colour, values in curves:
        figure.add_scatter(
            x=time, y=_curve(values), name=f"{name} (%)", mode="lines", line={"color": colour}
        )
    most_threads = max(s.run_threads for s in host.samples)
    figure.add_scatter(
        x=time,
        y=_curve([s.run_threads for s in host.samples]),
        name="threads of the run (right)",
        mode="lines",
        line={"color": _ORANGE, "dash": "dot"},
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
    start = _time_zero(record, host)
    time = _thinned(np.array([s.unix_s - start for s in host.samples]))
    figure = go.Figure()
    curves = (
        ("CPU idle", _BLUE, [s.cpu_idle_percent for s in host.samples]),
        ("IOWait", _RED, [iowait_percent(s) for s in host.samples]),
    )
    for name, colour, values in curves:
        figure.add_scatter(
            x=time, y=_curve(values), name=f"{name} (%)", mode="lines", line={"color": colour}
        )
    figure.update_yaxes(title="% of the host's CPU time", range=[0, 102])
    return _over_time(figure, record, host, f"CPU idle and IOWait on {host.host}")


def _over_time(figure: go.Figure, record: TrialRecord, host: HostTrace, title: str) -> Chart:
    start = _time_zero(record, host)
    for name, (_, colour) in _SHADES.items():
        span = span_on_host(record, host.host, name)
        if span is None:
            continue
        low, high = span[0] - start, span[1] - start
        figure.add_vrect(
            x0=low, x1=high, fillcolor=colour, opacity=0.16, line_width=0, layer="below"
        )
    figure.update_xaxes(title="seconds since the launch command", rangemode="tozero")
    return _chart(figure, title=title, caption="", height_px=270, legend=True)


def _stacked(
    bars: Sequence[tuple[str, Phases]], names: Sequence[str], axis_title: str
) -> go.Figure:
    figure = go.Figure()
    labels = [label for label, _ in bars][::-1]
    for name in names:
        values = [phases.get(name) for _, phases in bars][::-1]
        figure.add_bar(
            orientation="h",
            y=labels,
            x=values,
            name=PHASE_WORDS[name],
            marker={"color": _PHASE_COLOURS[name], "line": {"width": 0}},
            hovertemplate="%{y}<br>" + PHASE_WORDS[name] + " %{x:.4g} s<extra></extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.25)
    figure.update_xaxes(title=axis_title)
    return figure


def _chart(
    figure: go.Figure,
    *,
    title: str,
    caption: str,
    height_px: int,
    legend: bool = False,
    right: int = 24,
) -> Chart:
    layout: dict[str, Any] = {
        "template": "none",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 60, "r": right, "t": 12, "b": 48},
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "showlegend": legend,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "hovermode": "closest",
    }
    figure.update_layout(**layout)
    figure.update_xaxes(automargin=True, zeroline=False)
    figure.update_yaxes(automargin=True, zeroline=False)
    return Chart(json=figure.to_json(), height_px=height_px, title=title, caption=caption)


def _first_repeats(comparison: Comparison, workload: str) -> list[tuple[Row, TrialAnalysis]]:
    return [(row, comparison.trials[row.configuration][0]) for row in comparison.rows_of(workload)]


def _loss_caption(trials: Sequence[TrialAnalysis]) -> str:
    lengths = {len(t.steps.loss) for t in trials}
    if len(trials) < 2 or len(lengths) != 1 or lengths == {0}:
        return "First repeat of each configuration."
    curves = np.stack([t.steps.loss for t in trials])
    furthest = float(np.max(np.ptp(curves, axis=0)))
    apart = "They are equal" if furthest == 0 else f"They are at most {furthest:.2g} apart"
    return (
        "First repeat of each configuration. The same training gives the same curve: where only "
        f"one is seen, the others lie beneath it. {apart}."
    )


def _speedup_label(row: Row) -> str:
    paper = paper_speedup(row)
    beside = "" if paper is None else f" · paper {paper:g}"
    ours = NOT_MEASURED if row.speedup is None else with_bounds(row.speedup)
    return f"{'1 (baseline)' if row.is_baseline else ours}{beside}"


def _way(row: Row) -> str:
    return row.configuration.removeprefix(f"{row.workload}.")


def _time_zero(record: TrialRecord, host: HostTrace) -> float:
    launched = launch_on_host(record, host.host)
    return host.samples[0].unix_s if launched is None else launched


def _curve(values: Iterable[float | None]) -> NDArray[np.float32]:
    """A curve's values with gaps where nothing was measured."""
    return _thinned(np.array([np.nan if v is None else v for v in values], dtype=np.float32))


def _thinned(values: NDArray[Any]) -> NDArray[np.float32]:
    """At most _POINTS evenly spaced values, in single precision."""
    stride = -(-len(values) // _POINTS) or 1
    return values[::stride].astype(np.float32)
