"""Local strategies on several nodes: section of the page and of the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.analysis.compare.from_one_node import FromOneNode, PredictedSpeedup
from paceline.analysis.compare.local_global import (
    STEP_PARTS,
    LocalGlobal,
    OnNodes,
    StrategyLine,
)
from paceline.analysis.compare.places import GAP_PARTS, LauncherGap, Place
from paceline.analysis.compare.run import Comparison
from paceline.analysis.compare.traces import TraceRelation, TraceRelations, TraceScope
from paceline.analysis.trial.reading import TIMES
from paceline.show.report.answers import (
    PART_WORDS,
    TRACE_WORDS,
    answers,
    further_answers,
    gap_name,
    percent_bounds,
    predicted_strategy,
    seconds_words,
    strategy_words,
)
from paceline.show.report.columns import interval_cell
from paceline.show.report.section import Cell, Column, Detail, Section, Table
from paceline.show.report.wording import (
    MINUS,
    NOT_MEASURED,
    arithmetic_words,
    place_words,
    share,
)

if TYPE_CHECKING:
    from paceline.show.report.figures.charts import Chart

    DrawChart = Callable[[Comparison, LocalGlobal], Chart]

QUESTION = "Does the local strategy matter on several nodes?"
_FORMULA = (
    f"Global speedup = nodes {TIMES} local speedup {TIMES} efficiency between nodes. The local "
    "speedup is that of the strategy on one node. All speedups are over the baseline."
)


def answer_view(comparison: Comparison, workload: str) -> Section | None:
    """Return what the terminal shows; None without strategies on several nodes."""
    found = [each for each in comparison.local_global if each.workload == workload]
    parts = [
        Section(table=_strategy_table(comparison, each), sentences=answers(comparison, each))
        for each in found
    ]
    return Section(title=f"{workload}: {QUESTION}", parts=parts) if parts else None


def local_global_section(comparison: Comparison, draw: DrawChart) -> Section | None:
    """Return the section of the page; None without strategies on several nodes.

    draw: a parameter, because the terminal, which shows `answer_view`, must not load Plotly.
    """
    if not comparison.local_global:
        return None
    return Section(
        title=QUESTION,
        anchor="local-global",
        intro=_FORMULA,
        parts=[_part(comparison, found, draw) for found in comparison.local_global],
    )


def _part(comparison: Comparison, found: LocalGlobal, draw: DrawChart) -> Section:
    details = (
        ("Parts of a step", _parts_table(comparison, found)),
        ("Spark against MPI", _gap_table(comparison, found)),
        ("Traces and global speedup", _trace_table(found.traces)),
        ("Predicted from one node", _prediction_table(comparison, found.from_one_node)),
    )
    return Section(
        title=f"{found.workload}{arithmetic_words(comparison, found)}",
        sentences=further_answers(comparison, found),
        parts=[
            Section(
                charts=(draw(comparison, found),),
                table=_strategy_table(comparison, found),
            ),
            *(
                Section(title=f"{title}, {found.workload}", folded=True, table=table)
                for title, table in details
                if table.items
            ),
        ],
    )


def _strategy_table(comparison: Comparison, found: LocalGlobal) -> Table[StrategyLine]:
    """Show the speedups; a narrow terminal shows one place for each number of nodes."""
    columns: list[Column[StrategyLine]] = [
        Column("strategy", lambda line: strategy_words(comparison, line.configuration), "name"),
        Column("speedup on\none node", lambda line: interval_cell(line.speedup)),
    ]
    shown: set[int] = set()
    wide = Detail.WIDE
    for answer in sorted(found.answers, key=lambda each: (each.place.nodes, -each.strategies)):
        detail = Detail.PAGE if answer.place.nodes in shown else Detail.NARROW
        shown.add(answer.place.nodes)
        where = place_words(answer.place).replace(" (", "\n(")
        columns += [
            Column(where, _at(answer.place, _speedup_cell), detail=detail),
            Column("effi-\nciency", _at(answer.place, _efficiency), detail=detail),
            Column("interval", _at(answer.place, _efficiency_bounds), detail=max(detail, wide)),
        ]
    return Table(columns=columns, items=[line for line in found.lines if line.several], gap=1)


def _at(place: Place, cell: Callable[[OnNodes], Cell]) -> Callable[[StrategyLine], Cell]:
    def value(line: StrategyLine) -> Cell:
        there = line.at(place)
        return Cell(NOT_MEASURED) if there is None else cell(there)

    return value


def _speedup_cell(there: OnNodes) -> Cell:
    return interval_cell(there.speedup)


def _efficiency(there: OnNodes) -> Cell:
    return Cell(share(None if there.efficiency is None else there.efficiency.estimate))


def _efficiency_bounds(there: OnNodes) -> Cell:
    return Cell(NOT_MEASURED if there.efficiency is None else percent_bounds(there.efficiency))


_StepOf = tuple[str, str, dict[str, float]]  # strategy, place, seconds by part


def _parts_table(comparison: Comparison, found: LocalGlobal) -> Table[_StepOf]:
    """Show the shares of the parts of a step on one node and at each place."""
    items: list[_StepOf] = []
    for line in found.lines:
        name = strategy_words(comparison, line.configuration)
        items.append((name, "one node", line.parts_s))
        items += [(name, place_words(each.place), each.parts_s) for each in line.several]

    def part_share(part: str) -> Callable[[_StepOf], str]:
        return lambda item: share(item[2][part] / sum(item[2].values()))

    columns: list[Column[_StepOf]] = [
        Column("strategy", lambda item: item[0], "name", names_row=True),
        Column("place", lambda item: item[1], "name", names_row=True),
        *(Column(PART_WORDS[part], part_share(part)) for part in STEP_PARTS),
    ]
    return Table(columns=columns, items=[item for item in items if item[2]])


def _gap_table(comparison: Comparison, found: LocalGlobal) -> Table[LauncherGap]:
    def difference(name: str) -> Callable[[LauncherGap], str]:
        def cell(gap: LauncherGap) -> str:
            same = (part.difference_s for part in gap.parts if part.part == name)
            return next((seconds_words(each) for each in same), NOT_MEASURED)

        return cell

    columns: list[Column[LauncherGap]] = [
        Column("strategy", lambda gap: gap_name(comparison, found, gap), "name", names_row=True),
        Column("place", lambda gap: place_words(gap.place), "name", names_row=True),
        Column("speed of steps,\nSpark over MPI", lambda gap: interval_cell(gap.speed)),
        *(Column(f"{part}, Spark\nlonger by, s", difference(part)) for part in GAP_PARTS),
    ]
    return Table(columns=columns, items=found.gaps)


_Related = tuple[TraceScope, TraceRelation]


def _trace_table(traces: TraceRelations | None) -> Table[_Related]:
    """Show the correlations over all places and within each number of nodes."""

    def signed(value: float | None) -> str:
        return NOT_MEASURED if value is None else f"{value:.2f}".replace("-", MINUS)

    columns: list[Column[_Related]] = [
        Column("trace", lambda item: TRACE_WORDS[item[1].trace], "name", names_row=True),
        Column("nodes", lambda item: str(item[0].nodes or "all"), "name", names_row=True),
        Column("places", lambda item: str(item[0].places)),
        Column("rank\ncorrelation", lambda item: signed(item[1].correlation)),
        Column("beyond the\nlocal speedup", lambda item: signed(item[1].beyond_local)),
        Column("p", _p_value),
        Column("significant\n(5 %, Holm)", lambda item: "yes" if item[1].is_significant else "no"),
        Column("strategies\nneeded", lambda item: str(item[1].strategies_needed or NOT_MEASURED)),
    ]
    scopes = () if traces is None else traces.scopes
    return Table(columns=columns, items=[(s, each) for s in scopes for each in s.relations])


def _p_value(item: _Related) -> str:
    found = item[1].p_value
    return NOT_MEASURED if found is None else f"{found:.2g}"


def _prediction_table(comparison: Comparison, found: FromOneNode) -> Table[PredictedSpeedup]:
    columns: list[Column[PredictedSpeedup]] = [
        Column(
            "strategy",
            lambda each: predicted_strategy(comparison, each),
            "name",
            names_row=True,
        ),
        Column("place", lambda each: place_words(each.place), "name", names_row=True),
        Column("predicted\nspeedup", lambda each: interval_cell(each.predicted)),
        Column("measured\nspeedup", lambda each: interval_cell(each.measured)),
        Column("predicted /\nmeasured", lambda each: interval_cell(each.error)),
        Column("not predicted,\nbecause", lambda each: each.reason or "", "text"),
    ]
    return Table(columns=columns, items=found.speedups)
