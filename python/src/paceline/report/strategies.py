"""Local strategies in the report, as plain values for the template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.analysis.labels import local_name, strategy_name
from paceline.report import figures
from paceline.report.wording import NOT_MEASURED, arithmetic_words, listed, place_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.analysis.comparison import Comparison
    from paceline.analysis.local_global import Relation
    from paceline.analysis.row import Row
    from paceline.report.figures import Chart

    # keeps a chart and returns its name
    Add = Callable[[Chart], str]

_LEAST_FOR_A_CLAIM = 5  # of 4! orders two are perfect: 8 %, so 4 strategies never reach 5 %


def node_local(comparison: Comparison, add: Add) -> list[dict[str, Any]]:
    """Return rows and figure for each workload with two strategies under launcher `local`."""
    found = []
    for workload in comparison.workloads:
        rows = [r for r in comparison.rows_of(workload) if r.launcher == "local" and r.repeats]
        if len(rows) < 2:
            continue
        use = figures.local_use_chart(comparison, workload, rows)
        kinds = {r.memory_peak_kind for r in rows if r.memory_peak_kind is not None}
        found.append(
            {
                "workload": workload,
                "rows": [(local_name(row, comparison.rows), row) for row in rows],
                "memory_kinds": sorted(kinds),
                "use": None if use is None else add(use),
            }
        )
    return found


def pipelines(comparison: Comparison, add: Add) -> list[dict[str, Any]]:
    """Return rows and the figure of stages for each workload with a measured pipeline."""
    found = []
    for workload in comparison.workloads:
        rows = [r for r in comparison.rows_of(workload) if r.pipeline and r.pipeline.stages]
        if rows:
            found.append(
                {
                    "workload": workload,
                    "rows": rows,
                    "stages": add(figures.stage_chart(comparison, workload, rows)),
                }
            )
    return found


def local_global(comparison: Comparison, add: Add) -> list[dict[str, Any]]:
    """Return strategies by launcher, a figure and sentences, for each workload and arithmetic."""
    return [
        {
            "workload": found.workload,
            "arithmetic": arithmetic_words(comparison, found),
            "places": [place_name(r.launcher, r.nodes) for r in found.relations],
            "lines": [
                {
                    "name": _name(comparison, line.configuration),
                    "alone": line.speedup,
                    "there": [line.under(r.launcher, r.nodes) for r in found.relations],
                }
                for line in found.lines
                if line.elsewhere
            ],
            "chart": add(figures.local_global_chart(comparison, found)),
            "sentences": [relation_sentence(comparison, r) for r in found.relations],
        }
        for found in comparison.local_global
    ]


def relation_sentence(comparison: Comparison, relation: Relation) -> str:
    """Say whether the fastest alone is the fastest there, and how the orders agree."""
    return f"{_fastest(comparison, relation)} {_order(relation)}"


def _fastest(comparison: Comparison, relation: Relation) -> str:
    place = place_name(relation.launcher, relation.nodes)
    alone = _name(comparison, relation.fastest_alone)
    there = _name(comparison, relation.fastest_there)
    if relation.same_fastest is True:
        return f"The strategy that is fastest alone, {alone}, is also the fastest under {place}."
    if relation.same_fastest is False:
        return (
            f"The strategy that is fastest alone, {alone}, is not the fastest under {place}: there "
            f"it is {there}."
        )
    if relation.fastest_alone == relation.fastest_there:
        first = f"{alone} is fastest alone and under {place}"
    else:
        first = f"{alone} is fastest alone, {there} under {place}"
    ties = [
        f"{where} with {listed([_name(comparison, c) for c in tied])}"
        for where, tied in (("alone", relation.tied_alone), ("there", relation.tied_there))
        if tied
    ]
    return f"{first}, but it is a tie {' and '.join(ties)}: the difference is not significant."


def _order(relation: Relation) -> str:
    n = relation.strategies
    if relation.rank_correlation is None:
        return f"{n} strategies are too few to compare their order."
    value = f"{relation.rank_correlation:.2f}".replace("-", "\N{MINUS SIGN}")
    sentence = f"Spearman's rank correlation of the speedups is {value} (n = {n} strategies"
    if n < _LEAST_FOR_A_CLAIM:
        return f"{sentence}; too few for a conclusion)."
    return f"{sentence})."


def _name(comparison: Comparison, configuration: str) -> str:
    return strategy_name(comparison.row(configuration), comparison.rows)


def split_point_words(row: Row) -> list[tuple[str, str, str]]:
    """Return layer, and MB forward and backward per step, for each split point."""
    return [
        (split.before, _megabytes(split.bytes_forward), _megabytes(split.bytes_backward))
        for split in (row.pipeline.split_points if row.pipeline is not None else ())
    ]


def _megabytes(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value / 1e6:.3g} MB"
