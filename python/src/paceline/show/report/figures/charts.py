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

from paceline.analysis.compare.result import Comparison
from paceline.analysis.compare.row import Row
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.show.report.wording import reach

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
        "array": [reach(i) - i.median for i in intervals],
        "arrayminus": [i.median - i.low if i.is_known else 0.0 for i in intervals],
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
