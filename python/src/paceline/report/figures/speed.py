"""Figures of speed: speedups with their intervals, step times, and loss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from paceline.analysis.compare.labels import short_name
from paceline.report.figures.charts import (
    BLUE,
    GREY,
    chart,
    colours,
    first_repeats,
    omitted,
    reach,
    shown_rows,
    spread,
    thinned,
)
from paceline.report.wording import NOT_MEASURED, with_bounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.analysis.compare.result import Comparison
    from paceline.analysis.compare.row import Row
    from paceline.analysis.trial_analysis import TrialAnalysis
    from paceline.report.figures.charts import Chart


_MOST_LINES = 8  # of configurations that are not equivalent


def speedup_chart(comparison: Comparison, workload: str) -> Chart:
    """Draw the speedups with their intervals."""
    rows = [r for r in shown_rows(comparison, workload) if r.speedup is not None][::-1]
    palette = colours(comparison)
    figure = go.Figure(
        go.Bar(
            orientation="h",
            y=[short_name(r, comparison.rows) for r in rows],
            x=[r.speedup.median for r in rows if r.speedup],
            marker={
                "color": [palette[r.configuration] for r in rows],
                "opacity": [1 if r.has_comparable_speed else 0.35 for r in rows],
            },
            error_x=spread([r.speedup for r in rows if r.speedup]),
            customdata=[with_bounds(r.speedup) for r in rows],
            hovertemplate="%{y}<br>%{customdata}<extra></extra>",
        )
    )
    most = max((reach(r.speedup) for r in rows if r.speedup), default=1.0)
    for row in rows:
        figure.add_annotation(
            x=1.0,
            xref="paper",
            y=short_name(row, comparison.rows),
            xanchor="left",
            xshift=8,
            text=_speedup_label(row),
            showarrow=False,
        )
    figure.add_vline(x=1, line={"dash": "dot", "width": 1, "color": GREY})
    figure.update_xaxes(title="speedup over the baseline", range=[0, most * 1.05])
    return chart(
        figure,
        title=f"Speedup, {workload}",
        caption="Bars: median; lines: 95 % confidence interval. Pale bars: equivalence was not "
        f"shown.{omitted(comparison, workload)}",
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
    equivalent = [trial for row, trial in curves if row.equivalent is True]
    others = [(row, trial) for row, trial in curves if row.equivalent is not True]
    figure = go.Figure()
    if equivalent:
        _add_band(figure, equivalent)
    palette = colours(comparison)
    for row, trial in others[:_MOST_LINES]:
        figure.add_scatter(
            x=thinned(trial.steps.step),
            y=thinned(trial.steps.loss),
            name=short_name(row, comparison.rows),
            mode="lines",
            line={"color": palette[row.configuration], "width": 1.5, "dash": "dot"},
        )
    figure.update_xaxes(title="global step")
    figure.update_yaxes(title="loss (mean of the global batch)")
    return chart(
        figure,
        title=f"Loss, {workload}",
        caption=_loss_caption(equivalent, len(others)) + omitted(comparison, workload),
        height_px=340,
        legend=True,
    )


def _add_band(figure: go.Figure, trials: Sequence[TrialAnalysis]) -> None:
    """Draw the median loss of several trials, and the range between the lowest and the highest."""
    length = min(len(t.steps.loss) for t in trials)
    losses = np.stack([t.steps.loss[:length] for t in trials])
    steps = thinned(trials[0].steps.step[:length])
    for values, fill in ((losses.max(axis=0), None), (losses.min(axis=0), "tonexty")):
        figure.add_scatter(
            x=steps,
            y=thinned(values),
            mode="lines",
            line={"width": 0},
            fill=fill,
            fillcolor="rgba(0,114,178,0.2)",
            showlegend=False,
            hoverinfo="skip",
        )
    figure.add_scatter(
        x=steps,
        y=thinned(np.median(losses, axis=0)),
        name=f"equivalent configurations ({len(trials)})",
        mode="lines",
        line={"color": BLUE, "width": 2},
    )


def _loss_caption(equivalent: Sequence[TrialAnalysis], others: int) -> str:
    parts = ["First repeat of each configuration."]
    if len(equivalent) > 1:
        length = min(len(t.steps.loss) for t in equivalent)
        losses = np.stack([t.steps.loss[:length] for t in equivalent])
        furthest = float(np.max(np.ptp(losses, axis=0), initial=0.0))
        parts.append("Line: median of the equivalent ones; band: their range.")
        if math.isfinite(furthest):
            spread = "are equal" if furthest == 0 else f"differ by at most {furthest:.2g}"
            parts.append(f"They {spread}.")
    if others > _MOST_LINES:
        parts.append(f"{others - _MOST_LINES} other configurations are not shown.")
    return " ".join(parts)


def _speedup_label(row: Row) -> str:
    if row.is_baseline:
        return "1 (baseline)"
    return NOT_MEASURED if row.speedup is None else with_bounds(row.speedup)
