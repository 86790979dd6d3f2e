"""`paceline predict` for the terminal; it fits 80 columns."""

from __future__ import annotations

from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING

from paceline.analysis.predict.prediction import CONFIDENCE
from paceline.report.section import Column, Section, Table, terminal_view
from paceline.report.wording import NOT_MEASURED, in_milliseconds, listed, number, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from paceline.analysis.predict.prediction import Prediction, Predictions, Refusal

_MOST_NODES = 8  # different numbers of nodes in the table; JSON has all
_COLUMNS: tuple[Column[Prediction], ...] = (
    Column("nodes", lambda found: str(found.nodes)),
    Column("strategy", lambda found: found.setup, "text"),
    Column("trans-\nport", lambda found: found.transport or NOT_MEASURED, "text"),
    Column("samples\n/s", lambda found: number(found.samples_per_s.median)),
    Column(
        "interval",
        lambda found: f"{number(found.samples_per_s.low)} to {number(found.samples_per_s.high)}",
    ),
    Column("step\nms", lambda found: in_milliseconds(found.step_s.median)),
    Column("node\nms", lambda found: in_milliseconds(found.node_s)),
    Column("slowest\nms", lambda found: in_milliseconds(found.waiting_s)),
    Column(
        "comm.\nms",
        lambda found: in_milliseconds(found.exposed_s if found.nodes > 1 else None),
    ),
)


def predictions_view(found: Predictions) -> RenderableType:
    """Show the predictions, fastest first for each number of nodes, and what is refused."""
    parts = [
        Section(title=f"{workload}, predicted", table=_table(list(same)))
        for workload, same in groupby(found.predictions, lambda p: p.workload)
    ]
    meaning = (
        f"Predicted, not measured. Intervals: {share(CONFIDENCE)}. node: own step; slowest: "
        "waiting for the slowest node; comm.: communication that computation does not hide."
    )
    remarks = [
        meaning,
        *_start_lines(found.predictions),
        *(f"Assumed: {sentence}." for sentence in found.assumptions),
    ]
    parts.append(Section(notes=remarks))
    if found.refusals:
        parts.append(Section(title="Not predicted:", sentences=refusal_sentences(found.refusals)))
    return terminal_view(Section(parts=parts))


def _table(predictions: Sequence[Prediction]) -> Table[Prediction]:
    wanted = shown_nodes([each.nodes for each in predictions])
    shown = [each for each in predictions if each.nodes in wanted]
    return Table(columns=_COLUMNS, items=shown, gap=1)


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


def _node_words(nodes: Sequence[int]) -> str:
    """Return for example `1 node`, `8 to 64 nodes` or `3 and 5 nodes`."""
    if len(nodes) > 2 and nodes[-1] - nodes[0] == len(nodes) - 1:
        return f"{nodes[0]} to {nodes[-1]} nodes"
    if len(nodes) > 4:
        return f"{len(nodes)} numbers from {nodes[0]} to {nodes[-1]} nodes"
    return f"{listed([str(n) for n in nodes])} {'node' if list(nodes) == [1] else 'nodes'}"
