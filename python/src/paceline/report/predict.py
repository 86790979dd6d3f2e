"""`paceline predict` for the terminal; it fits 80 columns."""

from __future__ import annotations

from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paceline.analysis.predict.prediction import CONFIDENCE
from paceline.report.wording import NOT_MEASURED, in_milliseconds, listed, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from paceline.analysis.predict.prediction import Prediction, Predictions, Refusal

_MOST_NODES = 8  # different numbers of nodes in the table; JSON has all


def predictions_view(found: Predictions) -> RenderableType:
    """Show the predictions, fastest first for each number of nodes, and what is refused."""
    parts: list[RenderableType] = []
    for workload, same in groupby(found.predictions, lambda p: p.workload):
        parts += [_table(workload, list(same)), Text("")]
    parts.append(
        Text(
            f"Predicted, not measured. Intervals: {100 * CONFIDENCE:.0f} %. node: own step; "
            "slowest: waiting for the slowest node; comm.: communication that computation does "
            "not hide.",
            style="dim",
        )
    )
    parts += [Text(line, style="dim") for line in _start_lines(found.predictions)]
    parts += [Text(f"Assumed: {sentence}.", style="dim") for sentence in found.assumptions]
    if found.refusals:
        parts.append(Text("\nNot predicted:", style="bold"))
        parts += [Padding(Text(line), (0, 0, 0, 2)) for line in refusal_sentences(found.refusals)]
    return Group(*parts)


def _start_lines(predictions: Sequence[Prediction]) -> list[str]:
    """Say how long a trial takes before its steps under each launcher."""
    found: dict[str, list[float]] = {}
    for each in predictions:
        for launcher, seconds in each.start_s.items():
            found.setdefault(launcher, []).append(seconds)
    if not found:
        return []
    times = [f"{launcher} {number(median(seconds), 2)} s" for launcher, seconds in found.items()]
    return [f"Before the steps a trial takes, as measured: {listed(times)}."]


def refusal_sentences(refusals: Sequence[Refusal]) -> list[str]:
    """Say what is not predicted, why, and what to measure; one sentence for each reason."""
    names: dict[tuple[tuple[int, ...], str, str], list[str]] = {}
    for each in refusals:
        over = "" if each.transport is None else f" over {each.transport}"
        key = each.nodes, each.reason, each.measure
        names.setdefault(key, []).append(f"{each.setup}{over}")
    return [
        f"{listed(setups)}, {_node_words(nodes)}: {reason}. To predict: {measure}."
        for (nodes, reason, measure), setups in names.items()
    ]


def shown_nodes(nodes: Sequence[int]) -> list[int]:
    """Return the numbers of nodes that a table shows: all, or the powers of two and the last."""
    found = sorted(set(nodes))
    if len(found) <= _MOST_NODES:
        return found
    return [n for n in found if n & (n - 1) == 0 or n == found[-1]]


def _table(workload: str, predictions: list[Prediction]) -> Table:
    table = Table(
        title=f"{workload}, predicted",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="dim",
    )
    for column in ("nodes", "strategy", "trans-\nport"):
        table.add_column(column, justify="right" if column == "nodes" else "left")
    for column in ("samples\n/s", "interval", "step\nms", "node\nms", "slowest\nms", "comm.\nms"):
        table.add_column(column, justify="right", no_wrap=True)
    wanted = shown_nodes([p.nodes for p in predictions])
    for found in predictions:
        if found.nodes in wanted:
            rate = found.samples_per_s
            table.add_row(
                str(found.nodes),
                found.setup,
                found.transport or NOT_MEASURED,
                number(rate.median),
                f"{number(rate.low)} to {number(rate.high)}",
                in_milliseconds(found.step_s.median),
                in_milliseconds(found.node_s),
                in_milliseconds(found.waiting_s),
                in_milliseconds(found.exposed_s) if found.nodes > 1 else NOT_MEASURED,
            )
    return table


def _node_words(nodes: Sequence[int]) -> str:
    """Return for example `1 node`, `8 to 64 nodes` or `3 and 5 nodes`."""
    if len(nodes) > 2 and nodes[-1] - nodes[0] == len(nodes) - 1:
        return f"{nodes[0]} to {nodes[-1]} nodes"
    if len(nodes) > 4:
        return f"{len(nodes)} numbers from {nodes[0]} to {nodes[-1]} nodes"
    return f"{listed([str(n) for n in nodes])} {'node' if list(nodes) == [1] else 'nodes'}"
