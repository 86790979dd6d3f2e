"""Shared parts of all figures: colours, layout, curves, and Plotly's library.

Colours are those of Okabe and Ito (Color Universal Design, 2008), which people with any kind of
colour blindness can tell apart; a configuration has one colour in every figure. Text and grid
colours are left to the page, which knows whether it is light or dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.io import from_json
from plotly.offline import get_plotlyjs

from paceline.analysis.compare.row import Row, short_name
from paceline.analysis.compare.run import Comparison
from paceline.analysis.explain.explanation import Explanation
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.trial.communication import TrialCommunication
from paceline.analysis.trial.phases import RankPhases
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.measure.records.phases import LABELS, PHASES, STEP_PHASES
from paceline.show.report.wording import drawn

_POINTS = 400  # of a curve: more are not visible, and would make the page large
_TITLE_PX = 40
MOST_SHOWN = 24  # configurations in a figure; tables have all
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#B8A900", "#999999")
BLUE, GREEN, ORANGE, RED = PALETTE[0], PALETTE[2], PALETTE[1], PALETTE[4]
GREY = "#888888"
PHASE_COLOURS = {
    "launch": "#6E6E6E",
    "imports": "#9C8F7A",
    "data_load": "#C9B458",
    "data_wait": "#F0E442",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "bubble": "#CC79A7",
    "comm_wait": "#E69F00",
    "comm_transfer": "#D55E00",
    "optimizer": "#009E73",
    "other": "#C8C8C8",
    "teardown": "#3F3F3F",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure for the page: Plotly's JSON, its height in pixels, and what it shows in words."""

    json: str
    height_px: int
    title: str
    caption: str

    def figure(self) -> go.Figure:
        """Return the figure with title and height, which otherwise the page adds.

        The legend moves to the right: above the plot it would overlap the title.
        """
        found = from_json(self.json)
        found.update_layout(
            title=self.title,
            height=self.height_px + _TITLE_PX,
            margin={"t": 12 + _TITLE_PX},
            legend={"orientation": "v", "x": 1.08, "y": 1, "yanchor": "top"},
        )
        return found


def plotly_js() -> str:
    """Return Plotly's library, to be put into the page once (MIT licence, stated in its text)."""
    script: str = get_plotlyjs()
    return script


def colours(comparison: Comparison) -> dict[str, str]:
    """Choose a colour for each configuration, the same in every workload.

    With more configurations than colours, each local strategy has a colour.
    """
    names = sorted({_without_workload(row) for row in comparison.rows})
    if len(names) <= len(PALETTE):
        by_name = dict(zip(names, PALETTE, strict=False))
        return {row.configuration: by_name[_without_workload(row)] for row in comparison.rows}
    strategies = sorted({row.setup.local_strategy for row in comparison.rows})
    by_strategy = dict(zip(strategies, cycle(PALETTE), strict=False))
    return {row.configuration: by_strategy[row.setup.local_strategy] for row in comparison.rows}


def chart(
    figure: go.Figure,
    *,
    title: str,
    caption: str,
    height_px: int,
    legend: bool = False,
    right: int = 24,
    top: int = 12,
) -> Chart:
    layout: dict[str, Any] = {
        "template": "none",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 60, "r": right, "t": top, "b": 48},
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "showlegend": legend,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "hovermode": "closest",
    }
    figure.update_layout(**layout)
    figure.update_xaxes(automargin=True, zeroline=False)
    figure.update_yaxes(automargin=True, zeroline=False)
    return Chart(json=figure.to_json(), height_px=height_px, title=title, caption=caption)


def shown_rows(comparison: Comparison, workload: str) -> list[Row]:
    """Return the measured rows that figures show: all, or the fastest ones and the baseline."""
    rows = [row for row in comparison.rows_of(workload) if row.repeats]
    if len(rows) <= MOST_SHOWN:
        return rows
    kept = {row.configuration for row in rows[: MOST_SHOWN - 1]}
    return [row for row in rows if row.configuration in kept or row.is_baseline]


def first_repeats(comparison: Comparison, workload: str) -> list[tuple[Row, TrialAnalysis]]:
    """Return the rows that figures show, each with its first repeat."""
    rows = shown_rows(comparison, workload)
    return [(row, comparison.trials[row.configuration][0]) for row in rows]


def omitted(comparison: Comparison, workload: str) -> str:
    """Return a sentence if figures do not show all configurations, else an empty text."""
    rows = [row for row in comparison.rows_of(workload) if row.repeats]
    if len(rows) <= MOST_SHOWN:
        return ""
    return f" Shown: the {MOST_SHOWN - 1} fastest of {len(rows)} configurations and the baseline."


def spread(intervals: Sequence[Interval]) -> dict[str, Any]:
    """Return Plotly's error bars from the bounds of intervals."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [drawn(i)[1] - i.estimate for i in intervals],
        "arrayminus": [i.estimate - drawn(i)[0] for i in intervals],
        "thickness": 1.5,
        "width": 3,
        "color": GREY,
    }


def thinned(values: NDArray[Any]) -> NDArray[np.float32]:
    """Return at most _POINTS evenly spaced values in single precision."""
    stride = -(-len(values) // _POINTS) or 1
    return values[::stride].astype(np.float32)


def _without_workload(row: Row) -> str:
    return row.configuration.removeprefix(f"{row.workload}.")


# Figures of bars: time of a trial, a step, its communication, stages; parts of a difference

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
