"""Figures of evaluations: each metric over training time, wall time, samples or epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from paceline.analysis.compare.labels import short_name
from paceline.report.figures.charts import GREY, chart, colours, first_repeats, omitted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.analysis.compare.result import Comparison
    from paceline.analysis.trial.evaluation import Evaluations
    from paceline.report.figures.charts import Chart


# Attributes of Evaluations, and titles: buttons of the figure choose among them.
_AXES = {
    "training_s": "training time, s",
    "wall_s": "wall time, s, with evaluations",
    "samples": "samples",
    "epochs": "epochs",
}


def metric_chart(
    comparison: Comparison, workload: str, metric: str, over: str = "training_s"
) -> Chart:
    """Draw a metric, one line for each configuration. over: the axis that is chosen first."""
    palette = colours(comparison)
    figure = go.Figure()
    target = None
    drawn = []
    for row, trial in first_repeats(comparison, workload):
        found = trial.evaluations
        if found is None or metric not in found.metrics:
            continue
        figure.add_scatter(
            x=getattr(found, over),
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
    figure.update_xaxes(title=_AXES[over], rangemode="tozero")
    figure.update_layout(updatemenus=[_axis_buttons(drawn, over)])
    figure.update_yaxes(title=metric)
    return chart(
        figure,
        title=f"{metric}, {workload}",
        caption=caption + omitted(comparison, workload),
        height_px=360,
        legend=True,
    )


def _axis_buttons(drawn: Sequence[Evaluations], over: str) -> dict[str, Any]:
    """Return buttons that put all curves over another axis; an axis without values has none."""
    known = [axis for axis in _AXES if all(np.isfinite(getattr(e, axis)).all() for e in drawn)]
    return {
        "type": "buttons",
        "direction": "right",
        "x": 1,
        "xanchor": "right",
        "y": -0.16,  # below the plot: the legend is above it
        "yanchor": "top",
        "active": known.index(over) if over in known else -1,
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
