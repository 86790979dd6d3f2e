"""Sections of the page about local strategies, pipelines, and local strategy and launcher."""

from __future__ import annotations

from collections.abc import Callable

from paceline.analysis.compare.local_global import LocalGlobal, Relation, StrategyLine
from paceline.analysis.compare.row import Row, short_name, strategy_name
from paceline.analysis.compare.run import Comparison
from paceline.analysis.trial.phases import PipelineTimes
from paceline.analysis.trial.reading import DOT, TIMES
from paceline.show.report.columns import comparison_table, interval_cell
from paceline.show.report.figures.charts import stage_chart
from paceline.show.report.figures.speed import local_global_chart, local_use_chart
from paceline.show.report.section import Cell, Column, Detail, Section, Table
from paceline.show.report.sections import of_workloads
from paceline.show.report.wording import (
    MINUS,
    NOT_MEASURED,
    arithmetic_words,
    listed,
    megabytes,
    place_name,
    share,
)

_FIGURE_WORDS = {
    "cpu_percent": "the CPU use of the nodes",
    "threads_median": "the number of threads",
    "ram_percent_mean": "the memory in use",
    "iowait_percent": "IOWait",
    "context_switches_per_s": "the rate of context switches",
}


def local_section(comparison: Comparison) -> Section | None:
    """Compare the strategies under launcher `local`; None without a workload that has two."""
    return of_workloads(
        comparison,
        _local_part,
        title="Local strategies",
        anchor="local",
        intro=(
            "How one node uses its cores (intra-node parallelism), measured under launcher local. "
            "Efficiency is speedup over allocated cores. Names: "
            f"replicas{TIMES}threads of each; of a pipeline stages{TIMES}threads, of a hybrid "
            f"replicas{DOT}stages{TIMES}threads, m the micro-batches of a replica's share."
        ),
    )


def _local_part(comparison: Comparison, workload: str) -> Section | None:
    rows = [r for r in comparison.rows_of(workload) if r.setup.launcher == "local" and r.repeats]
    if len(rows) < 2:
        return None
    use = local_use_chart(comparison, workload, rows)
    return Section(
        title=workload,
        sentences=node_figure_sentences(comparison, workload),
        table=comparison_table(comparison, workload, Detail.PAGE, rows=rows),
        parts=() if use is None else (Section(charts=(use,)),),
    )


def node_figure_sentences(comparison: Comparison, workload: str) -> list[str]:
    """Name the figures of the nodes that go along with the speedup, with significance."""
    return [
        f"Over all {each.configurations} equivalent configurations, {_FIGURE_WORDS[each.figure]} "
        f"and speedup are related: rank correlation {_signed(each.rank_correlation)} (permutation "
        f"test, p = {each.p_value:.2g}; 5 %, Holm)."
        for each in comparison.node_figures
        if each.workload == workload and each.is_significant
    ]


def _signed(correlation: float) -> str:
    return f"{correlation:.2f}".replace("-", MINUS)


def pipelines_section(comparison: Comparison) -> Section | None:
    """Show bubble, stages and split points of measured pipelines; None without any."""
    return of_workloads(
        comparison,
        _pipelines_part,
        title="Pipelines",
        anchor="pipelines",
        intro=(
            "The bubble is the share of forward, backward and waiting for neighbours in which a "
            f"stage waits, mean over the stages. The theoretical bubble is (s {MINUS} 1) / "
            f"(m + s {MINUS} 1) "
            "for s equal stages and m equal micro-batches without transfer costs. Differences "
            "come from unequal stages, transfer of activations, and the machine. Bytes are those "
            "of one replica's share of a step."
        ),
    )


def _pipelines_part(comparison: Comparison, workload: str) -> Section | None:
    rows = comparison.rows_of(workload)
    found = [
        (row, row.work.pipeline) for row in rows if row.work.pipeline and row.work.pipeline.stages
    ]
    if not found:
        return None
    columns: list[Column[tuple[Row, PipelineTimes]]] = [
        Column("pipeline", lambda item: short_name(item[0], comparison.rows), "name"),
        Column("stages", lambda item: str(item[0].placement.stages)),
        Column("micro-batches", lambda item: str(item[0].setup.options.get("micro_batches"))),
        Column("schedule", lambda item: str(item[0].setup.options.get("schedule")), "name"),
        Column("bubble\nmeasured", lambda item: share(item[1].bubble_measured, 1)),
        Column("bubble\nin theory", lambda item: share(item[1].bubble_theoretical, 1)),
        Column("stages busy, %", lambda item: _busy(item[1])),
        Column("split before", lambda item: _split_points(item[1], 0), "text"),
        Column("MB forward", lambda item: _split_points(item[1], 1), "text"),
        Column("MB backward", lambda item: _split_points(item[1], 2), "text"),
    ]
    drawn = stage_chart(comparison, workload, [row for row, _ in found])
    return Section(
        title=workload,
        table=Table(columns=columns, items=found, style=lambda i: "" if i[0].ranked else "soft"),
        parts=(Section(charts=(drawn,)),),
    )


def _busy(pipeline: PipelineTimes) -> str:
    return ", ".join(f"{100 * stage.busy_share:.0f}" for stage in pipeline.stages)


def _split_points(pipeline: PipelineTimes, figure: int) -> str:
    """Return a line for each split point: its layer, or the MB that cross it in a step."""
    lines = [
        (split.before, megabytes(split.bytes_forward), megabytes(split.bytes_backward))[figure]
        for split in pipeline.split_points
    ]
    return "\n".join(lines) or NOT_MEASURED


def local_global_section(comparison: Comparison) -> Section | None:
    """Relate the strategies alone to those under other launchers; None without any."""
    if not comparison.local_global:
        return None
    parts = [
        Section(
            title=f"{found.workload}{arithmetic_words(comparison, found)}",
            sentences=[relation_sentence(comparison, each) for each in found.relations],
            table=_relation_table(comparison, found),
            parts=(Section(charts=(local_global_chart(comparison, found),)),),
        )
        for found in comparison.local_global
    ]
    return Section(
        title="Local strategy and global speedup",
        anchor="local-global",
        intro=(
            "This section shows whether the best strategy inside a node stays the best under "
            "other launchers. Each strategy alone (launcher local) is compared with the same "
            "strategy under other launchers; of several transports, the fastest counts. The ratio "
            "is that of the speeds, within the same repeat."
        ),
        parts=parts,
    )


def _relation_table(comparison: Comparison, found: LocalGlobal) -> Table[StrategyLine]:
    def there(relation: Relation, figure: str) -> Callable[[StrategyLine], Cell]:
        def cell(line: StrategyLine) -> Cell:
            elsewhere = line.under(relation.launcher, relation.nodes)
            return interval_cell(None if elsewhere is None else getattr(elsewhere, figure))

        return cell

    columns: list[Column[StrategyLine]] = [
        Column("strategy", lambda line: _name(comparison, line.configuration), "name"),
        Column("speedup alone", lambda line: interval_cell(line.speedup)),
    ]
    for relation in found.relations:
        place = place_name(relation.launcher, relation.nodes)
        columns += [
            Column(f"under {place}:\nspeedup", there(relation, "speedup")),
            Column(f"under {place}:\nratio to alone", there(relation, "ratio")),
        ]
    return Table(columns=columns, items=[line for line in found.lines if line.elsewhere])


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
        first = f"{alone} had the highest speed alone and under {place}"
    else:
        first = f"{alone} had the highest speed alone, {there} under {place}"
    near = [
        f"{where} from {listed([_name(comparison, c) for c in tied])}"
        for where, tied in (
            ("alone", relation.not_separated_alone),
            ("there", relation.not_separated_there),
        )
        if tied
    ]
    return f"{first}, but it is not separated {' and '.join(near)}: the difference may be chance."


def _order(relation: Relation) -> str:
    n = relation.strategies
    if relation.rank_correlation is None:
        return f"{n} strategies are too few to compare their order."
    value = _signed(relation.rank_correlation)
    sentence = f"Spearman's rank correlation of the speedups is {value} (n = {n} strategies"
    if relation.p_value is None:
        return f"{sentence})."
    sentence = f"{sentence}, p = {relation.p_value:.2g}, permutation test)"
    if not relation.is_significant:
        return f"{sentence}, which is not significant."
    return f"{sentence}."


def _name(comparison: Comparison, configuration: str) -> str:
    return strategy_name(comparison.row(configuration), comparison.rows)
