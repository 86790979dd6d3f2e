"""The figure of where communication time goes: a bar a rank, and beside it what was overlapped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from paceline.report.figures.charts import BLUE, PHASE_COLOURS, chart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.analysis.communication import RankCommunication, TrialCommunication
    from paceline.report.figures.charts import Chart

_OVERLAPPED = "rgba(213, 94, 0, 0.35)"  # the colour of transfer, pale: it costs no time of its own
_PARTS = (
    ("compute", BLUE),
    ("waiting for neighbouring stages", PHASE_COLOURS["bubble"]),
    ("exposed waiting", PHASE_COLOURS["comm_wait"]),
    ("exposed transfer", PHASE_COLOURS["comm_transfer"]),
)


def communication_chart(workload: str, profiles: Sequence[tuple[str, TrialCommunication]]) -> Chart:
    """Draw the step of each rank. profiles: with the names of their configurations."""
    bars = [
        (f"{name}  r{rank.rank}", rank) for name, profile in profiles for rank in profile.ranks
    ][::-1]
    figure = go.Figure()
    labels = [label for label, _ in bars]
    for name, colour in _PARTS:
        values = [_part(rank, name) for _, rank in bars]
        if any(values):
            _add(figure, labels, values, name, colour, "step")
    overlapped = [rank.overlapped_s or 0.0 for _, rank in bars]
    if any(overlapped):
        _add(figure, labels, overlapped, "overlapped communication", _OVERLAPPED, "beside")
    figure.update_layout(barmode="stack", bargap=0.25)
    figure.update_xaxes(title="seconds per step")
    return chart(
        figure,
        title=f"Communication of a step, {workload}",
        caption="One bar per rank (r0, r1, ...), first repeat. The pale bar above it is "
        "communication in parallel with the backward pass, which takes no extra time.",
        height_px=170 + 34 * len(bars),
        legend=True,
    )


def _add(
    figure: go.Figure,
    labels: list[str],
    values: list[float],
    name: str,
    colour: str,
    group: str,
) -> None:
    figure.add_bar(
        orientation="h",
        y=labels,
        x=values,
        name=name,
        offsetgroup=group,
        marker={"color": colour, "line": {"width": 0}},
        hovertemplate="%{y}<br>" + name + " %{x:.4g} s<extra></extra>",
    )


def _part(rank: RankCommunication, name: str) -> float:
    found = {
        "compute": rank.compute_s,
        "waiting for neighbouring stages": rank.phases_s["bubble"],
        "exposed waiting": rank.phases_s["comm_wait"],
        "exposed transfer": rank.phases_s["comm_transfer"],
    }[name]
    return found or 0.0
