"""Sections of the page about lossy training, failures, time, evaluations and the sidecar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline.analysis.compare.compression import CompressionEffect
from paceline.analysis.compare.local_global import LocalGlobal, Relation, StrategyLine
from paceline.analysis.compare.row import Row, short_name, strategy_name
from paceline.analysis.compare.run import Comparison
from paceline.analysis.trial.phases import PipelineTimes
from paceline.analysis.trial.reading import DOT, TIMES
from paceline.analysis.trial.recovery import FailureCost, failure_costs
from paceline.analysis.trial.stragglers import Staleness
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.measure.records.phases import ALL_PHASES, OTHER_SPANS
from paceline.show.report.columns import comparison_table, interval_cell
from paceline.show.report.figures.charts import stage_chart
from paceline.show.report.figures.speed import local_global_chart, local_use_chart
from paceline.show.report.section import Cell, Column, Detail, Section, Table
from paceline.show.report.wording import (
    MINUS,
    NOT_MEASURED,
    arithmetic_words,
    bounds,
    listed,
    mebibytes,
    megabytes,
    number,
    place_name,
    share,
    signed,
    whole,
    with_bounds,
)

_BASELINE_MARK = "†"
_OTHER_SPANS = {
    "rendezvous": "of “other”:\nrendezvous",
    "model_build": "model\nbuilding",
    "restore": "reading a\ncheckpoint",
    "evaluation": "evaluation",
    "bookkeeping": "writing\nresults",
}
_STALENESS = (
    "Staleness: updates of the same weights between their fetch and the update. Lead: over the "
    "slowest worker."
)
_NOT_DETERMINISTIC = (
    "Without a barrier the order of updates differs from run to run (except in a pipeline): these "
    "trainings are not deterministic and not equivalent."
)
_UNKNOWN_FAILURE = "not caused by the run"


def of_workloads(
    comparison: Comparison, part: Callable[[Comparison, str], Section | None], **fields: Any
) -> Section | None:
    """Return a section with a part for each workload that has one; None without any.

    fields: of the section.
    """
    found = [part(comparison, workload) for workload in comparison.workloads]
    parts = [each for each in found if each is not None]
    return Section(parts=parts, **fields) if parts else None


def lossy_section(comparison: Comparison, workload: str) -> Section | None:
    """Compare lossy configurations of a workload with their exact form; None without any."""
    found = [part for part in comparison.compression if part.workload == workload]
    if not found:
        return None
    steps = f"the last {found[0].last_steps} of {found[0].steps} steps"
    remarks = [
        f"Bytes are rank 0's. Loss: mean of {steps}.",
        "Speedup and loss difference are relative to the exact form of the configuration.",
    ]
    if any(not part.reference_is_exact_form for part in found):
        remarks.append(
            f"{_BASELINE_MARK} relative to the baseline: the run has no exact form of it."
        )

    def name(configuration: str | None) -> str:
        return NOT_MEASURED if configuration is None else name_in(comparison, configuration)

    columns: list[Column[CompressionEffect]] = [
        Column("\nconfiguration", lambda part: name(part.configuration), "text"),
        Column("MB a\nstep", lambda part: megabytes(part.sent_bytes_per_step)),
        Column(
            "un-\ncompressed",
            lambda part: megabytes(part.uncompressed_bytes_per_step),
            detail=Detail.PAGE,
        ),
        Column("of\nall", _sent_share),
        Column("s per\nstep", lambda part: number(part.step_s)),
        Column("reference", lambda part: number(part.reference_step_s), detail=Detail.PAGE),
        Column("speed\nup", _lossy_speedup),
        Column("interval", _lossy_bounds, detail=Detail.PAGE),
        Column("loss", lambda part: number(part.loss, 4)),
        Column("reference", lambda part: number(part.reference_loss, 4), detail=Detail.PAGE),
        Column("loss\ndifference", lambda part: signed(part.loss_difference)),
        Column("reference", lambda part: name(part.reference), "text", Detail.PAGE),
    ]
    table = Table(columns=columns, items=found, gap=1)
    return Section(title=f"Lossy training, {workload}", table=table, notes=remarks)


def _sent_share(part: CompressionEffect) -> str:
    return NOT_MEASURED if part.sent_share is None else f"{100 * part.sent_share:.3g} %"


def _lossy_speedup(part: CompressionEffect) -> str:
    mark = "" if part.reference_is_exact_form else _BASELINE_MARK
    return NOT_MEASURED if part.speedup is None else f"{part.speedup.median:.2f}{mark}"


def _lossy_bounds(part: CompressionEffect) -> str:
    return NOT_MEASURED if part.speedup is None else bounds(part.speedup)


def staleness_section(comparison: Comparison, workload: str) -> Section | None:
    """Describe how stale recorded updates are; None if no update was recorded."""
    rows = comparison.rows_of(workload)
    found = [(row, row.work.staleness) for row in rows if row.work.staleness is not None]
    if not found:
        return None
    remarks = [_STALENESS]
    if any(row.equivalence.is_lossy for row, _ in found):
        remarks.append(_NOT_DETERMINISTIC)

    columns: list[Column[tuple[Row, Staleness]]] = [
        Column("\nconfiguration", lambda item: _named(comparison, item[0]), "text"),
        Column("updates", lambda item: str(item[1].updates)),
        Column("mean", lambda item: number(item[1].mean)),
        Column("95 %", lambda item: number(item[1].p95)),
        Column("max", lambda item: str(item[1].max)),
        Column("lead,\nsteps", lambda item: whole(item[1].lead_steps_max)),
    ]
    return Section(
        title=f"Staleness of updates, {workload}",
        table=Table(columns=columns, items=found, gap=1),
        notes=remarks,
    )


def recovery_section(comparison: Comparison) -> Section | None:
    """Show the cost of a failure of each kind; None if no trial survived one."""
    costs = [cost for row in comparison.rows for cost in _costs_of(comparison, row)]
    if not costs:
        return None
    columns: list[Column[FailureCost]] = [
        Column("configuration", lambda cost: name_in(comparison, cost.configuration), "name"),
        Column("failed", lambda cost: cost.kind or _UNKNOWN_FAILURE, "name"),
        Column("failures", lambda cost: str(cost.failures)),
        Column("until\nnoticed", lambda cost: number(cost.detect_s)),
        Column("until new\nprocesses", lambda cost: number(cost.restart_s)),
        Column("until state\nrestored", lambda cost: number(cost.restore_s)),
        Column("until end of\nnext step", lambda cost: number(cost.next_step_s)),
        Column("downtime", lambda cost: number(cost.downtime_s)),
        Column("lost\nsteps", lambda cost: number(cost.lost_steps)),
        Column("lost\nwork", lambda cost: number(cost.lost_work_s)),
        Column("delay by a\ncheckpoint", lambda cost: number(cost.checkpoint_s)),
    ]
    return Section(
        title="Failures and recovery",
        anchor="recovery",
        intro=(
            "Cost of a failure by what failed: a rank, an executor with its ranks, or a host. "
            "Medians over all failures, in seconds. The downtime runs from the failure to the end "
            "of the first new step. The lost work is repeated in addition. Neither belongs to the "
            "speeds above; the time to a target includes both."
        ),
        table=Table(columns=columns, items=costs),
    )


def _costs_of(comparison: Comparison, row: Row) -> list[FailureCost]:
    trials = comparison.trials.get(row.configuration, ())
    survived = [each for trial in trials for each in trial.recoveries]
    return failure_costs(row.configuration, survived, _known(t.checkpoint_delay_s for t in trials))


def phase_table(comparison: Comparison, workload: str) -> Table[Row]:
    """Return the seconds of each phase and of the known parts of `other`."""

    columns: list[Column[Row]] = [
        Column("configuration", lambda row: _named(comparison, row), "name"),
        *(Column(p.label, _phase_cell(p.name), tip=p.meaning) for p in ALL_PHASES),
        Column("sum", lambda row: number(row.times.wall_s)),
        *(Column(_OTHER_SPANS.get(n, n), _other_part_cell(n)) for n in OTHER_SPANS),
    ]
    return Table(columns=columns, items=comparison.rows_of(workload))


def _phase_cell(name: str) -> Callable[[Row], str]:
    return lambda row: number(row.times.phases_s[name])


def _other_part_cell(name: str) -> Callable[[Row], str]:
    return lambda row: number(row.times.other_parts_s[name])


def evaluation_table(comparison: Comparison, workload: str) -> Table[Row] | None:
    """Return the metrics of the configurations with evaluations; None if there are none."""
    rows = [row for row in comparison.rows_of(workload) if row.result.metrics]
    if not rows:
        return None

    def metric(name: str) -> Callable[[Row], str]:
        return lambda row: number(row.result.metrics.get(name), 4)

    columns: list[Column[Row]] = [
        Column("configuration", lambda row: _named(comparison, row), "name")
    ]
    if rows[0].goal.target is not None:
        columns += [
            Column("time to target, s", _target_cell),
            Column("over the\nbaseline", lambda row: with_bounds(row.goal.target_speedup)),
            Column("steps to\ntarget", lambda row: number(row.goal.steps_to_target)),
            Column("reached", lambda row: f"{row.goal.target_reached or 0} of {row.repeats}"),
        ]
    columns.append(Column("samples/s", lambda row: interval_cell(row.speed.samples_per_s)))
    columns += [Column(f"{name}\nat the end", metric(name)) for name in metrics_of(rows)]
    return Table(columns=columns, items=rows, style=lambda row: "" if row.ranked else "soft")


def metrics_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.result.metrics))


def name_in(comparison: Comparison, name: str) -> str:
    """Return the short name of a configuration."""
    return short_name(comparison.row(name), comparison.rows)


def _target_cell(row: Row) -> Cell:
    return (
        Cell("missed")
        if row.goal.time_to_target_s is None
        else interval_cell(row.goal.time_to_target_s)
    )


def _named(comparison: Comparison, row: Row) -> Cell:
    return Cell(short_name(row, comparison.rows), tip=row.configuration)


def sidecar_sentence(comparison: Comparison) -> str | None:
    """Describe the highest cost of a sidecar in the run; None where there was no sidecar."""
    trials = [t for found in comparison.trials.values() for t in found]
    cores = _known(t.sidecar.core_percent for t in trials)
    memory = _known(t.sidecar.rss_peak_bytes for t in trials)
    if not cores or not memory:
        return None
    interval_s = min(_known(t.sidecar.interval_s for t in trials), default=None)
    every = "" if interval_s is None else f", with a sample every {number(interval_s, 2)} s"
    return (
        f"At most {number(max(cores), 2)} % of one core and {mebibytes(max(memory))} MiB, on the "
        f"host with the highest cost{every}. {_missed(trials)}"
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _missed(trials: list[TrialAnalysis]) -> str:
    samples = sum(t.sidecar.samples for t in trials)
    missed = sum(t.sidecar.missed_ticks for t in trials)
    gaps = sum(t.sidecar.gaps for t in trials)
    words = f"It missed {missed} of {samples + missed} samples"
    if gaps:
        words += f"; {gaps} {'stretch has' if gaps == 1 else 'stretches have'} no samples"
    return f"{words}."


# --- sections of the page about local strategies, pipelines, and local strategy and launcher -----

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
