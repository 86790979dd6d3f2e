"""Figures of evaluations: each metric over the time of the training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from paceline.analysis.labels import short_name
from paceline.report.figures.charts import GREY, chart, colours, first_repeats, omitted

if TYPE_CHECKING:
    from paceline.analysis.comparison import Comparison
    from paceline.report.figures.charts import Chart


def metric_chart(comparison: Comparison, workload: str, metric: str) -> Chart:
    """Draw a metric over the training time, one line for each configuration."""
    palette = colours(comparison)
    figure = go.Figure()
    target = None
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
            customdata=np.stack([found.steps, found.epoch, found.samples], axis=1),
            hovertemplate="%{fullData.name}<br>%{y:.4g} after %{x:.4g} s, %{customdata[0]} steps "
            "(epoch %{customdata[1]}, %{customdata[2]} samples)<extra></extra>",
        )
        target = trial.record.trial.training.target
    if target is not None and target.metric == metric:
        level = target.at_most if target.at_least is None else target.at_least
        figure.add_hline(y=level, line={"dash": "dot", "width": 1, "color": GREY})
    figure.update_xaxes(title="training time, s", rangemode="tozero")
    figure.update_yaxes(title=metric)
    return chart(
        figure,
        title=f"{metric} over training time, {workload}",
        caption="First repeat of each configuration, on held-out samples. The dotted line is the "
        f"target.{omitted(comparison, workload)}",
        height_px=360,
        legend=True,
    )
