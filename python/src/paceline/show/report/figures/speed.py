"""Figures of speed and quality: speedups with their intervals, step times, loss, evaluations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from paceline.analysis.compare.result import Comparison
from paceline.analysis.compare.row import short_name
from paceline.analysis.trial.evaluation import Evaluations
from paceline.show.report.figures.charts import (
    BLUE,
    GREY,
    Chart,
    chart,
    colours,
    first_repeats,
    omitted,
    shown_rows,
    spread,
    thinned,
)
from paceline.show.report.wording import reach, with_bounds

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
            x=[r.speed.speedup.median for r in rows if r.speed.speedup],
            marker={
                "color": [palette[r.configuration] for r in rows],
                "opacity": [1 if r.has_comparable_speed else 0.35 for r in rows],
            },
            error_x=spread([r.speed.speedup for r in rows if r.speed.speedup]),
            customdata=[with_bounds(r.speed.speedup) for r in rows],
            hovertemplate="%{y}<br>%{customdata}<extra></extra>",
        )
    )
    most = max((reach(r.speed.speedup) for r in rows if r.speed.speedup), default=1.0)
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
        caption="Bars: geometric mean; lines: 95 % confidence interval. Pale bars: equivalence "
        f"was not shown.{omitted(comparison, workload)}",
        height_px=110 + 34 * len(rows),
        right=210,
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
