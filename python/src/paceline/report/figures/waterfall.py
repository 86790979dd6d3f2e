"""The figure of a difference: from the faster step to the slower one, part by part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from paceline.report.figures.charts import BLUE, GREEN, GREY, RED, chart

if TYPE_CHECKING:
    from paceline.analysis.explain.explanation import Explanation
    from paceline.report.figures.charts import Chart

_LEAST_SHARE = 0.002  # of a step: smaller parts are not drawn


def waterfall_chart(explanation: Explanation, faster: str, slower: str) -> Chart:
    """Draw how the parts of a step lead from one configuration to the other.

    faster, slower: their short names.
    """
    found = explanation.difference
    workload = explanation.slower_trial.training.workload
    least_s = _LEAST_SHARE * found.slower_s
    parts = [part for part in found.parts if abs(part.difference_s.mean) >= least_s]
    whole = [found.faster_s, *(part.difference_s.mean for part in parts), found.slower_s]
    figure = go.Figure()
    figure.add_waterfall(
        x=[faster, *(part.label for part in parts), slower],
        y=whole,
        measure=["absolute", *["relative"] * len(parts), "total"],
        increasing={"marker": {"color": RED}},
        decreasing={"marker": {"color": GREEN}},
        totals={"marker": {"color": BLUE}},
        connector={"line": {"color": GREY, "width": 1}},
        hovertemplate="%{x}<br>%{y:.4g} s<extra></extra>",
    )
    figure.update_yaxes(title="seconds per step", rangemode="tozero")
    return chart(
        figure,
        title=f"Why {slower} takes longer per step than {faster}, {workload}",
        caption="Each bar is the difference of one part of the mean step; green parts are faster.",
        height_px=360,
    )
