"""Figures of evaluations: each metric over the training time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from paceline.analysis.compare.labels import short_name
from paceline.report.figures.charts import GREY, chart, colours, first_repeats, omitted

if TYPE_CHECKING:
    from paceline.analysis.compare.result import Comparison
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
            customdata=np.stack(
                [found.training_s, found.steps, found.epochs, found.samples], axis=1
            ),
            hovertemplate="%{fullData.name}<br>%{y:.4g} after %{customdata[0]:.4g} s, "
            "%{customdata[1]} steps (%{customdata[2]:.3g} epochs, %{customdata[3]} samples)"
            "<extra></extra>",
        )
        target = trial.record.trial.training.target
    caption = "First repeat of each configuration, on held-out samples."
    if target is not None and target.metric == metric:
        level = target.at_most if target.at_least is None else target.at_least
        figure.add_hline(y=level, line={"dash": "dot", "width": 1, "color": GREY})
        caption += " The dotted line is the target."
    figure.update_xaxes(title="training time, s", rangemode="tozero")
    figure.update_yaxes(title=metric)
    return chart(
        figure,
        title=f"{metric}, {workload}",
        caption=caption + omitted(comparison, workload),
        height_px=360,
        legend=True,
    )

