"""Figures of speed and quality: speedups with their intervals, step times, loss, evaluations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from paceline.analysis.compare.local_global import LocalGlobal, OnNodes, StrategyLine
from paceline.analysis.compare.row import (
    NO_TRANSPORT,
    Row,
    local_name,
    short_name,
    strategy_name,
)
from paceline.analysis.compare.run import Comparison
from paceline.analysis.compare.weak_scaling import ScalingPoint, WeakScaling
from paceline.analysis.trial.evaluation import Evaluations
from paceline.analysis.trial.host_frames import read_series
from paceline.show.report.figures.charts import (
    BLUE,
    GREY,
    MOST_SHOWN,
    PALETTE,
    Chart,
    chart,
    colours,
    first_repeats,
    omitted,
    shown_rows,
    spread,
    thinned,
)
from paceline.show.report.figures.hosts import curve
from paceline.show.report.wording import (
    DASH,
    arithmetic_words,
    counted,
    drawn,
    place_words,
    with_bounds,
)

_MOST_LINES = 8  # of configurations that are not equivalent
# Attributes of Evaluations, and titles: buttons of the figure choose among them.
_AXES = {
    "training_s": "training time, s",
    "wall_s": "wall time, s, with evaluations",
    "samples": "samples",
    "epochs": "epochs",
}


def speedup_chart(comparison: Comparison, workload: str) -> Chart:
    """Draw the speedups with their intervals."""
    rows = [r for r in shown_rows(comparison, workload) if r.speed.speedup is not None][::-1]
    palette = colours(comparison)
    figure = go.Figure(
        go.Bar(
            orientation="h",
            y=[short_name(r, comparison.rows) for r in rows],
            x=[r.speed.speedup.estimate for r in rows if r.speed.speedup],
            marker={
                "color": [palette[r.configuration] for r in rows],
                "opacity": [1 if r.has_comparable_speed else 0.35 for r in rows],
            },
            error_x=spread([r.speed.speedup for r in rows if r.speed.speedup]),
            customdata=[with_bounds(r.speed.speedup) for r in rows],
            hovertemplate="%{y}<br>%{customdata}<extra></extra>",
        )
    )
    most = max((drawn(r.speed.speedup)[1] for r in rows if r.speed.speedup), default=1.0)
    figure.add_trace(_repeat_points(rows, comparison))
    for row in rows:
        figure.add_annotation(
            x=1.0,
            xref="paper",
            y=short_name(row, comparison.rows),
            xanchor="left",
            xshift=8,
            text="1 (baseline)" if row.is_baseline else with_bounds(row.speed.speedup),
            name="beside",  # the page leaves it out where it is narrow
            showarrow=False,
        )
    figure.add_vline(x=1, line={"dash": "dot", "width": 1, "color": GREY})
    figure.update_xaxes(title="speedup over the baseline", range=[0, most * 1.05])
    return chart(
        figure,
        title=f"Speedup, {workload}",
        caption="Bars: estimate; lines: 95 % interval; points: repeats, hollow if other work "
        "probably slowed them. Pale bars: equivalence was not shown."
        f"{omitted(comparison, workload)}",
        height_px=110 + 34 * len(rows),
        right=210,
    )


def _repeat_points(rows: Sequence[Row], comparison: Comparison) -> go.Scatter:
    """Draw every repeat of the rows at its speed; disturbed ones are hollow."""
    points = [
        (short_name(row, comparison.rows), row.speed.speedup.estimate * each.relative, each)
        for row in rows
        if row.speed.speedup is not None
        for each in row.speed.repeat_speeds
    ]
    hollow = [(each.disturbed or 0.0) > 0.5 for _, _, each in points]
    return go.Scatter(
        mode="markers",
        y=[name for name, _, _ in points],
        x=[speedup for _, speedup, _ in points],
        marker={
            "symbol": ["circle-open" if each else "circle" for each in hollow],
            "color": GREY,
            "size": 7,
            "line": {"width": 1.5, "color": GREY},
        },
        customdata=[
            f"repeat {each.repeat}"
            + ("" if each.disturbed is None else f", disturbed with {each.disturbed:.0%}")
            for _, _, each in points
        ],
        hovertemplate="%{y}, %{customdata}<br>%{x:.2f}<extra></extra>",
        showlegend=False,
    )


def step_distribution_chart(comparison: Comparison, workload: str) -> Chart:
    """Draw the distribution of the times of all steady steps of all repeats."""
    palette = colours(comparison)
    figure = go.Figure()
    rows = shown_rows(comparison, workload)[::-1]
    for row in rows:
        values = [t.steps.time_s[t.steps.steady] for t in comparison.trials[row.configuration]]
        figure.add_box(
            # Sorted: every n-th step in time would be a biased choice of steps with a period of n.
            x=thinned(np.sort(np.concatenate(values))[::-1]),
            name=short_name(row, comparison.rows),
            orientation="h",
            marker={"color": palette[row.configuration], "size": 3},
            line={"width": 1.5},
            boxpoints="outliers",
        )
    figure.update_xaxes(title="seconds per global step", rangemode="tozero")
    return chart(
        figure,
        title=f"Step times, {workload}",
        caption="Steps after the warm-up of all repeats: median, quartiles, whiskers of 1.5 times "
        f"the interquartile range, and outliers.{omitted(comparison, workload)}",
        height_px=110 + 34 * len(rows),
    )


def loss_chart(comparison: Comparison, workload: str) -> Chart:
    """Draw the global loss: median and range of the equivalent configurations, others apart."""
    curves = first_repeats(comparison, workload)
    equivalent = [trial.steps for row, trial in curves if row.equivalence.equivalent is True]
    others = [(row, trial) for row, trial in curves if row.equivalence.equivalent is not True]
    figure = go.Figure()
    caption = "First repeat of each configuration."
    if equivalent:
        length = min(len(steps.loss) for steps in equivalent)
        losses = np.stack([steps.loss[:length] for steps in equivalent])
        _add_band(figure, equivalent[0].step[:length], losses)
        caption += _range_words(losses)
    palette = colours(comparison)
    for row, trial in others[:_MOST_LINES]:
        figure.add_scatter(
            x=thinned(trial.steps.step),
            y=thinned(trial.steps.loss),
            name=short_name(row, comparison.rows),
            mode="lines",
            line={"color": palette[row.configuration], "width": 1.5, "dash": "dot"},
        )
    if len(others) > _MOST_LINES:
        caption += f" {len(others) - _MOST_LINES} other configurations are not shown."
    figure.update_xaxes(title="global step")
    figure.update_yaxes(title="loss (mean of the global batch)")
    return chart(
        figure,
        title=f"Loss, {workload}",
        caption=caption + omitted(comparison, workload),
        height_px=340,
        legend=True,
    )


def _add_band(figure: go.Figure, steps: NDArray[Any], losses: NDArray[Any]) -> None:
    """Draw the median loss of several trials, and the range between the lowest and the highest."""
    for values, fill in ((losses.max(axis=0), None), (losses.min(axis=0), "tonexty")):
        figure.add_scatter(
            x=thinned(steps),
            y=thinned(values),
            mode="lines",
            line={"width": 0},
            fill=fill,
            fillcolor="rgba(0,114,178,0.2)",
            showlegend=False,
            hoverinfo="skip",
        )
    figure.add_scatter(
        x=thinned(steps),
        y=thinned(np.median(losses, axis=0)),
        name=f"equivalent configurations ({len(losses)})",
        mode="lines",
        line={"color": BLUE, "width": 2},
    )


def _range_words(losses: NDArray[Any]) -> str:
    """Say how far the losses of several configurations are apart."""
    if len(losses) < 2:
        return ""
    words = " Line: median of the equivalent ones; band: their range."
    furthest = float(np.max(np.ptp(losses, axis=0), initial=0.0))
    if not math.isfinite(furthest):
        return words
    spread = "are equal" if furthest == 0 else f"differ by at most {furthest:.2g}"
    return f"{words} They {spread}."


def metric_chart(comparison: Comparison, workload: str, metric: str) -> Chart:
    """Draw a metric, one line for each configuration, with buttons for the other axes."""
    palette = colours(comparison)
    figure = go.Figure()
    target = None
    drawn = []
    for row, trial in first_repeats(comparison, workload):
        found = trial.evaluations
        if found is None or metric not in found.metrics:
            continue
        figure.add_scatter(
            x=found.training_s,
            y=found.metrics[metric],
            name=short_name(row, comparison.rows),
            mode="lines+markers",
            line={"color": palette[row.configuration], "width": 1.5},
            marker={"size": 5},
            customdata=np.stack(
                [found.training_s, found.steps, found.epochs, found.samples], axis=1
            ),
            hovertemplate="%{fullData.name}<br>%{y:.4g} after %{customdata[0]:.4g} s, "
            "%{customdata[1]} steps (%{customdata[2]:.3g} epochs, %{customdata[3]} samples)"
            "<extra></extra>",
        )
        drawn.append(found)
        target = trial.record.trial.training.target
    caption = "First repeat of each configuration, on held-out samples."
    if target is not None and target.metric == metric:
        level = target.at_most if target.at_least is None else target.at_least
        figure.add_hline(y=level, line={"dash": "dot", "width": 1, "color": GREY})
        caption += " The dotted line is the target."
    figure.update_xaxes(title=_AXES["training_s"], rangemode="tozero")
    figure.update_layout(updatemenus=[_axis_buttons(drawn)])
    figure.update_yaxes(title=metric)
    return chart(
        figure,
        title=f"{metric}, {workload}",
        caption=caption + omitted(comparison, workload),
        height_px=360,
        legend=True,
    )


def _axis_buttons(drawn: Sequence[Evaluations]) -> dict[str, Any]:
    """Return buttons that put all curves over another axis; an axis without values has none."""
    known = [axis for axis in _AXES if all(np.isfinite(getattr(e, axis)).all() for e in drawn)]
    return {
        "type": "buttons",
        "direction": "right",
        "x": 1,
        "xanchor": "right",
        "y": -0.16,  # below the plot: the legend is above it
        "yanchor": "top",
        "active": 0,
        "buttons": [
            {
                "label": _AXES[axis].split(",", maxsplit=1)[0],
                "method": "update",
                "args": [
                    {"x": [getattr(e, axis).tolist() for e in drawn]},
                    {"xaxis.title.text": _AXES[axis]},
                ],
            }
            for axis in known
        ],
    }


# --- figures of local strategies: use of a node over time, and speed on several nodes ------------

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
    """Draw the speedup of each strategy on one node and on several."""
    figure = go.Figure()
    numbers = sorted({place.nodes for place in found.places})
    ways = sorted({(place.launcher, place.transport) for place in found.places})
    most = 0.0
    for place in found.places:
        pairs = [(line, there) for line in found.lines if (there := line.at(place)) is not None]
        most = max([most, *(max(drawn(li.speedup)[1], drawn(e.speedup)[1]) for li, e in pairs)])
        rows = [comparison.row(line.configuration) for line, _ in pairs]
        way = ways.index((place.launcher, place.transport))
        figure.add_scatter(
            x=[line.speedup.estimate for line, _ in pairs],
            y=[there.speedup.estimate for _, there in pairs],
            error_x=spread([line.speedup for line, _ in pairs]),
            error_y=spread([there.speedup for _, there in pairs]),
            name=place_words(place),
            mode="markers",
            marker={
                "size": 11,
                "symbol": _SYMBOLS[way % len(_SYMBOLS)],
                "color": PALETTE[numbers.index(place.nodes) % len(PALETTE)],
            },
            customdata=[_both(*pair) for pair in pairs],
            text=[strategy_name(row, comparison.rows) for row in rows],
            hovertemplate="%{text}<br>%{customdata}<extra></extra>",
        )
    figure.add_shape(
        type="line", x0=0, y0=0, x1=most, y1=most, line={"dash": "dot", "width": 1, "color": GREY}
    )
    figure.update_xaxes(title="local speedup (one node)", range=[0, most * 1.08])
    figure.update_yaxes(title="global speedup (several nodes)", range=[0, most * 1.08])
    return chart(
        figure,
        title=f"Local and global speedup, {found.workload}{arithmetic_words(comparison, found)}",
        caption="A point is a local strategy. Colour: number of nodes; shape: launcher and "
        "transport; lines: 95 % intervals. On the dotted line both speedups are equal.",
        height_px=460,
        legend=True,
    )


def _both(line: StrategyLine, there: OnNodes) -> str:
    efficiency = DASH if there.efficiency is None else f"{there.efficiency.estimate:.0%}"
    return (
        f"one node {with_bounds(line.speedup)}<br>"
        f"{place_words(there.place)} {with_bounds(there.speedup)}<br>"
        f"efficiency between nodes {efficiency}"
    )


def weak_scaling_chart(comparison: Comparison, own: Sequence[WeakScaling]) -> Chart:
    """Draw throughput and efficiency of each strategy over its replicas, for one workload."""
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.14)
    for number, each in enumerate(own):
        points = [p for p in each.points if p.throughput is not None and p.efficiency is not None]
        for column, values in enumerate(
            ([p.throughput for p in points], [p.efficiency for p in points]), start=1
        ):
            known = [value for value in values if value is not None]
            figure.add_scatter(
                x=[point.replicas for point in points],
                y=[value.estimate for value in known],
                error_y=spread(known),
                mode="lines+markers",
                name=_scaling_name(comparison, each),
                legendgroup=f"{number}",
                showlegend=column == 1,
                marker={"size": 9, "symbol": _SYMBOLS[number % len(_SYMBOLS)]},
                line={"color": PALETTE[number % len(PALETTE)], "width": 1.5},
                customdata=[with_bounds(value) for value in known],
                text=[_scaling_point(comparison, point) for point in points],
                hovertemplate="%{text}<br>%{customdata}<extra></extra>",
                row=1,
                col=column,
            )
    most = max(point.replicas for each in own for point in each.points)
    dotted = {"dash": "dot", "width": 1, "color": GREY}
    figure.add_shape(type="line", x0=1, y0=1, x1=most, y1=most, line=dotted, row=1, col=1)
    figure.add_shape(type="line", x0=1, y0=1, x1=most, y1=1, line=dotted, row=1, col=2)
    counts = sorted({point.replicas for each in own for point in each.points})
    figure.update_xaxes(title="replicas", tickvals=counts)
    for column, title in enumerate(("throughput over one replica", "efficiency"), start=1):
        figure.update_yaxes(title=title, rangemode="tozero", row=1, col=column)
    return chart(
        figure,
        title=f"Weak scaling, {own[0].workload}",
        caption=f"Each replica has {own[0].batch_per_replica} samples of a step. A line is a "
        "strategy under a launcher; vertical lines: 95 % intervals; dotted: as if the step of "
        "every number of replicas took as long as that of one.",
        height_px=360,
        legend=True,
    )


def _scaling_name(comparison: Comparison, each: WeakScaling) -> str:
    """Name a strategy with launcher and transport, and the replicas of a node if nodes grow."""
    row = comparison.row(each.points[-1].configuration)
    over = "" if row.setup.transport == NO_TRANSPORT else f" over {row.setup.transport}"
    per_node = each.replicas_per_node
    nodes = "" if per_node is None else f", {per_node} on each node"
    more = "".join(f", {label}" for label in row.setup.labels)
    return f"{row.setup.local_strategy} under {row.setup.launcher}{over}{nodes}{more}"


def _scaling_point(comparison: Comparison, point: ScalingPoint) -> str:
    name = short_name(comparison.row(point.configuration), comparison.rows)
    return f"{name}, {counted(point.replicas, 'replica')}, global batch {point.global_batch}"
