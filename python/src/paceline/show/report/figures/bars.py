"""Figures of bars: time of a trial, a step, its communication, stages; parts of a difference."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from paceline.analysis.compare.result import Comparison
from paceline.analysis.compare.row import Row, short_name
from paceline.analysis.explain.explanation import Explanation
from paceline.analysis.trial.communication import TrialCommunication
from paceline.analysis.trial.phases import RankPhases
from paceline.measure.records.phases import LABELS, PHASES, STEP_PHASES
from paceline.show.report.figures.charts import (
    BLUE,
    GREEN,
    GREY,
    PHASE_COLOURS,
    RED,
    Chart,
    chart,
    first_repeats,
    omitted,
)

Part = tuple[str, str, Sequence[float | None]]

_OVERLAPPED = "rgba(213, 94, 0, 0.35)"  # the colour of transfer, pale: it takes no extra time


def rank_time_chart(comparison: Comparison, workload: str) -> Chart:
    """Draw the time of each rank of each first repeat, from launch command to exit."""
    labels, ranks = _ranks(comparison, workload)
    parts = [(LABELS[n], PHASE_COLOURS[n], [rank.whole.get(n) for rank in ranks]) for n in PHASES]
    return _stacked(
        labels,
        parts,
        axis="seconds",
        title=f"Time of the whole trial, {workload}",
        caption="One bar per rank (r0, r1, ...), first repeat, from the launch command to its "
        "exit; the phases add up to the wall time." + omitted(comparison, workload),
    )


def step_time_chart(comparison: Comparison, workload: str) -> Chart:
    """Draw the mean step of each rank after the warm-up."""
    labels, ranks = _ranks(comparison, workload)
    parts = [
        (LABELS[n], PHASE_COLOURS[n], [rank.step.get(n) for rank in ranks]) for n in STEP_PHASES
    ]
    return _stacked(
        labels,
        parts,
        axis="seconds per step",
        title=f"Time of a step, {workload}",
        caption="One bar per rank, first repeat, mean over the steps after the warm-up."
        + omitted(comparison, workload),
    )


def communication_chart(workload: str, profiles: Sequence[tuple[str, TrialCommunication]]) -> Chart:
    """Draw the step of each rank, and beside it the communication that overlaps with computation.

    profiles: with the names of their configurations.
    """
    named = [(f"{name}  r{r.rank}", r) for name, profile in profiles for r in profile.ranks]
    ranks = [rank for _, rank in named]
    phases = {
        "waiting for neighbouring stages": "bubble",
        "exposed waiting": "comm_wait",
        "exposed transfer": "comm_transfer",
    }
    parts: list[Part] = [("compute", BLUE, [rank.compute_s for rank in ranks])]
    parts += [
        (name, PHASE_COLOURS[phase], [rank.phases_s[phase] for rank in ranks])
        for name, phase in phases.items()
    ]
    beside = ("overlapped communication", _OVERLAPPED, [rank.overlapped_s for rank in ranks])
    return _stacked(
        [label for label, _ in named],
        [part for part in parts if any(part[2])],
        beside=beside if any(beside[2]) else None,
        axis="seconds per step",
        title=f"Communication of a step, {workload}",
        caption="One bar per rank (r0, r1, ...), first repeat. The pale bar above it is "
        "communication in parallel with the backward pass, which takes no extra time.",
    )


def stage_chart(comparison: Comparison, workload: str, rows: Sequence[Row]) -> Chart:
    """Draw a median step of every stage of every pipeline."""
    stages = [
        (f"{short_name(row, comparison.rows)}  stage {stage.stage}", stage)
        for row in rows
        if row.work.pipeline is not None
        for stage in row.work.pipeline.stages
    ]
    parts = [
        (name, PHASE_COLOURS[name], [getattr(stage, f"{name}_s") for _, stage in stages])
        for name in ("forward", "backward", "bubble")
    ]
    return _stacked(
        [label for label, _ in stages],
        parts,
        axis="seconds per step",
        title=f"Stages, {workload}",
        caption="One bar per stage, median step after the warm-up: computing, and waiting for its "
        "neighbours (bubble). Stages "
        "with unequal computing times have unequal work: another split point may be better.",
    )


def _ranks(comparison: Comparison, workload: str) -> tuple[list[str], list[RankPhases]]:
    """Return label and phases of each rank of the first repeats."""
    named = [
        (f"{short_name(row, comparison.rows)}  r{rank.rank}", rank)
        for row, trial in first_repeats(comparison, workload)
        for rank in trial.phases
    ]
    return [label for label, _ in named], [rank for _, rank in named]


def _stacked(
    labels: Sequence[str],
    parts: Sequence[Part],
    *,
    axis: str,
    title: str,
    caption: str,
    beside: Part | None = None,
) -> Chart:
    """Draw a bar for each label, the first one on top. beside: a bar of its own for each label."""
    figure = go.Figure()
    for name, colour, values in (*parts, *([] if beside is None else [beside])):
        figure.add_bar(
            orientation="h",
            y=labels[::-1],
            x=values[::-1],
            name=name,
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate="%{y}<br>" + name + " %{x:.4g} s<extra></extra>",
            offsetgroup=None if beside is None else "step",
        )
    if beside is not None:
        figure.data[-1].offsetgroup = "beside"
    figure.update_layout(barmode="stack", bargap=0.25)
    figure.update_xaxes(title=axis)
    height_px = 170 + (26 if beside is None else 34) * len(labels)
    return chart(figure, title=title, caption=caption, height_px=height_px, legend=True)


_LEAST_SHARE = 0.002  # of a step: smaller parts are not drawn


def waterfall_chart(found: Explanation, workload: str, faster: str, slower: str) -> Chart:
    """Draw how the parts of a step lead from one configuration to the other.

    faster, slower: their short names.
    """
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
