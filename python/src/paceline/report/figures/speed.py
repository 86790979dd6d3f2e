"""Figures of speed: speedups with their intervals, times of steps, and the loss they led to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from paceline.report.figures.charts import GREY, chart, colours, first_repeats, thinned
from paceline.report.labels import short_name
from paceline.report.paper import paper_speedup
from paceline.report.wording import NOT_MEASURED, with_bounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.analysis.comparison import Comparison
    from paceline.analysis.row import Row
    from paceline.analysis.trial_analysis import TrialAnalysis
    from paceline.report.figures.charts import Chart


def speedup_chart(comparison: Comparison, workload: str) -> Chart:
    """Speedups with their intervals; the paper's are written beside, its machines were others."""
    rows = [r for r in comparison.rows_of(workload) if r.speedup is not None][::-1]
    palette = colours(comparison)
    figure = go.Figure(
        go.Bar(
            orientation="h",
            y=[short_name(r, comparison.rows) for r in rows],
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
                "color": GREY,
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
            y=short_name(row, comparison.rows),
            xanchor="left",
            xshift=8,
            text=_speedup_label(row),
            showarrow=False,
        )
    figure.add_vline(x=1, line={"dash": "dot", "width": 1, "color": GREY})
    figure.update_xaxes(title="speedup over sequential (times)", range=[0, most * 1.05])
    return chart(
        figure,
        title=f"Speedup, {workload}",
        caption="Bars: median; lines: 95 % interval. Pale bars are not ranked (not shown to be "
        "the same training). The paper's numbers come from other machines.",
        height_px=110 + 34 * len(rows),
        right=210,
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
            x=thinned(np.concatenate(values)),
            name=short_name(row, comparison.rows),
            orientation="h",
            marker={"color": palette[row.configuration], "size": 3},
            line={"width": 1.5},
            boxpoints="outliers",
        )
    figure.update_xaxes(title="seconds a global step", rangemode="tozero")
    return chart(
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
    curves = first_repeats(comparison, workload)
    for number, (row, trial) in enumerate(curves):
        figure.add_scatter(
            x=thinned(trial.steps.step),
            y=thinned(trial.steps.loss),
            name=short_name(row, comparison.rows),
            mode="lines",
            # wide first, narrow last: curves that coincide all show
            line={
                "color": palette[row.configuration],
                "width": 2 + 2.0 * (len(curves) - 1 - number) / max(1, len(curves) - 1) * 2,
            },
        )
    figure.update_xaxes(title="global step")
    figure.update_yaxes(title="loss (cross entropy, mean of the global batch)")
    return chart(
        figure,
        title=f"Loss, {workload}",
        caption=_loss_caption([trial for _, trial in curves]),
        height_px=380,
        legend=True,
    )


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
