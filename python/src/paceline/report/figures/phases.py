"""Figures of the time accounting: a bar per rank, divided into phases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from paceline.analysis.labels import short_name
from paceline.records.phases import LABELS, PHASES, STEP_PHASES
from paceline.report.figures.charts import PHASE_COLOURS, chart, first_repeats, omitted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.analysis.comparison import Comparison
    from paceline.records.phases import Phases
    from paceline.report.figures.charts import Chart


def rank_time_chart(comparison: Comparison, workload: str) -> Chart:
    """Time of each rank of each configuration's first repeat, launch command to exit."""
    bars = [
        (f"{short_name(row, comparison.rows)}  r{rank.rank}", rank.whole)
        for row, trial in first_repeats(comparison, workload)
        for rank in trial.phases
    ]
    figure = _stacked(bars, PHASES, "seconds from the launch command to its exit")
    return chart(
        figure,
        title=f"Time of the whole trial, {workload}",
        caption="One bar per rank (r0, r1, ...), first repeat; the phases add up to the wall time."
        + omitted(comparison, workload),
        height_px=170 + 26 * len(bars),
        legend=True,
    )


def step_time_chart(comparison: Comparison, workload: str) -> Chart:
    """A mean steady step of each rank."""
    bars = [
        (f"{short_name(row, comparison.rows)}  r{rank.rank}", rank.step)
        for row, trial in first_repeats(comparison, workload)
        for rank in trial.phases
    ]
    figure = _stacked(bars, STEP_PHASES, "seconds per step")
    return chart(
        figure,
        title=f"Time of a step, {workload}",
        caption="One bar per rank, first repeat, mean over the steps after the warm-up."
        + omitted(comparison, workload),
        height_px=170 + 26 * len(bars),
        legend=True,
    )


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
            name=LABELS[name],
            marker={"color": PHASE_COLOURS[name], "line": {"width": 0}},
            hovertemplate="%{y}<br>" + LABELS[name] + " %{x:.4g} s<extra></extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.25)
    figure.update_xaxes(title=axis_title)
    return figure
