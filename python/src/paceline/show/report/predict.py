"""`paceline predict` for the terminal; it fits 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import RenderableType

from paceline.analysis.predict.prediction import CONFIDENCE, Prediction, Predictions, Refusal
from paceline.analysis.statistics.intervals import Interval
from paceline.show.report.section import Column, Detail, Section, Table, detail_of, terminal_view
from paceline.show.report.wording import (
    NOT_MEASURED,
    bounds,
    bounds_in_words,
    in_milliseconds,
    listed,
    load_clause,
    number,
    range_of,
    share,
)

_MOST_NODES = 8  # different numbers of nodes in the table; JSON has all
_MOST_ANSWERS = 4
_COLUMNS: tuple[Column[Prediction], ...] = (
    Column("nodes", lambda found: str(found.nodes)),
    Column("strategy", lambda found: found.setup, "text"),
    Column("trans-\nport", lambda found: found.transport or NOT_MEASURED, "text"),
    Column("speed-\nup", lambda found: number(found.speedup)),
    Column("interval", lambda found: _bounds(found.speedup)),
    Column("samples\n/s", lambda found: number(found.samples_per_s.estimate)),
    Column("interval", lambda found: range_of(found.samples_per_s), detail=Detail.WIDE),
    Column("step\nms", lambda found: in_milliseconds(found.step_s.estimate)),
    Column("node\nms", lambda found: in_milliseconds(found.node_s), detail=Detail.WIDE),
    Column("slowest\nms", lambda found: in_milliseconds(found.waiting_s), detail=Detail.WIDE),
    Column("comm.\nms", lambda found: in_milliseconds(found.exposed_s or None)),
)


def predictions_view(found: Predictions, width: int = 80) -> RenderableType:
    """Show the answers, the predictions of each number of nodes, and what is refused."""
    parts = [
        Section(
            title=f"{workload}, predicted",
            sentences=list(_answers(same, found)),
            parts=[Section(table=_table(same))],
        )
        for workload, same in (
            (name, list(group)) for name, group in groupby(found.predictions, lambda p: p.workload)
        )
    ]
    meaning = (
        f"Predicted, not measured. Intervals of {share(CONFIDENCE)} are those of a new run. node: "
        "own step; slowest: waiting for the slowest node; comm.: communication that computation "
        "does not hide."
    )
    assumed = [f"Assumed: {sentence}." for sentence in found.assumptions]
    parts.append(Section(notes=[meaning, *assumed]))
    if found.refusals:
        refused = refusal_sentences(found.refusals, names_workload=len(found.load) > 1)
        parts.append(Section(title="Not predicted:", sentences=refused))
    return terminal_view(Section(parts=parts), detail_of(width))


def _answers(predictions: Sequence[Prediction], found: Predictions) -> Iterator[str]:
    """Yield how much faster the fastest setup on several nodes is, and what is not known."""
    numbers = [n for n in shown_nodes([each.nodes for each in predictions]) if n > 1]
    for nodes in numbers[:_MOST_ANSWERS]:
        best = next(each for each in predictions if each.nodes == nodes)  # the fastest is first
        if best.speedup is None:
            continue
        load = load_clause(found.load[best.workload]) if nodes == numbers[0] else ""
        yield (
            f"{nodes} nodes, {best.setup} over {best.transport}: {number(best.speedup)} times "
            f"({bounds_in_words(best.speedup)}) as fast as {found.fastest_alone[best.workload]} on "
            f"one node{load}. {judgement(best.speedup)}"
        )
    batches = [w.global_batch for w in found.unmeasured if w.workload == predictions[0].workload]
    if batches:
        yield (
            f"Steps of one node with {listed(list(map(str, batches)))} samples were not measured, "
            "so the intervals cover steps from as long as with the whole batch to proportional "
            "ones. --measure runs short trials and narrows them."
        )


def _bounds(speedup: Interval | None) -> str:
    if speedup is None or speedup.low == speedup.high:
        return NOT_MEASURED
    return bounds(speedup)


def judgement(speedup: Interval) -> str:
    """Say whether several nodes are faster than one, if the whole interval says so."""
    if speedup.low <= 1 <= speedup.high:
        return "It is not clear whether they are faster."
    return f"So they are {'slower' if speedup.high < 1 else 'faster'}."


def _table(predictions: Sequence[Prediction]) -> Table[Prediction]:
    wanted = shown_nodes([each.nodes for each in predictions])
    shown = [each for each in predictions if each.nodes in wanted]
    return Table(columns=_COLUMNS, items=shown, gap=1)


def refusal_sentences(refusals: Sequence[Refusal], *, names_workload: bool = False) -> list[str]:
    """Say what is not predicted, why, and what to measure; one sentence for each reason."""
    names: dict[tuple[str, tuple[int, ...], str, str], list[str]] = {}
    for each in refusals:
        over = "" if each.transport is None else f" over {each.transport}"
        key = each.workload, each.nodes, each.reason, each.measure
        names.setdefault(key, []).append(f"{each.setup}{over}")
    return [
        f"{f'{workload}: ' if names_workload else ''}{listed(setups)}, {_node_words(nodes)}: "
        f"{reason}. To predict: {measure}."
        for (workload, nodes, reason, measure), setups in names.items()
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
