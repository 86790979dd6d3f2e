"""Sections of the page about weak scaling, lossy training, failures, time, evaluations and the
sidecar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.analysis.compare.compression import CompressionEffect
from paceline.analysis.compare.row import Row, plain_name, short_name
from paceline.analysis.compare.run import Comparison
from paceline.analysis.compare.weak_scaling import ScalingPoint, WeakScaling
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.trial.reading import TIMES
from paceline.analysis.trial.recovery import FailureCost, failure_costs
from paceline.analysis.trial.stragglers import Staleness
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.measure.records.phases import ALL_PHASES, OTHER_SPANS
from paceline.show.report.columns import half_width, interval_cell, mark_cell
from paceline.show.report.section import Cell, Column, Detail, Section, Table
from paceline.show.report.wording import (
    NOT_MEASURED,
    bounds,
    bounds_in_words,
    counted,
    mebibytes,
    megabytes,
    number,
    signed,
    whole,
    with_bounds,
)

if TYPE_CHECKING:
    from paceline.show.report.figures.charts import Chart

    DrawScaling = Callable[[Comparison, Sequence[WeakScaling]], Chart]

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
_WEAK_SCALING = (
    "Every replica has the same number of samples of a step, so the global batch grows with the "
    "replicas. Throughput is samples/s over those of one replica. Efficiency is the step time of "
    "one replica over that of a configuration."
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


# --- weak scaling ---------------------------------------------------------------------------------


def weak_scaling_section(comparison: Comparison, draw: DrawScaling) -> Section | None:
    """Return the section of the page; None without a batch for each replica.

    draw: a parameter, because the terminal must not load Plotly.
    """
    by_entry = scalings_by_entry(comparison)
    if not by_entry:
        return None
    return Section(
        title="Weak scaling",
        anchor="weak-scaling",
        intro=_WEAK_SCALING,
        parts=[
            Section(
                title=_scaling_title(own),
                charts=(draw(comparison, own),),
                table=_scaling_table(comparison, own, Detail.PAGE),
                notes=_without_one_replica(comparison, own),
            )
            for own in by_entry.values()
        ],
    )


def weak_scaling_views(
    comparison: Comparison, workloads: Sequence[str], detail: Detail
) -> list[Section]:
    """Return what the terminal shows, a section for each entry that has one of the workloads."""
    return [
        Section(
            table=_scaling_table(comparison, own, detail, title=_scaling_title(own)),
            notes=[
                "Throughput and efficiency are relative to one replica.",
                *_without_one_replica(comparison, own),
            ],
        )
        for own in scalings_by_entry(comparison).values()
        if any(
            comparison.row(point.configuration).workload in workloads
            for each in own
            for point in each.points
        )
    ]


def scalings_by_entry(comparison: Comparison) -> dict[str, list[WeakScaling]]:
    """Return the weak scalings of each entry of [[workloads]]."""
    found: dict[str, list[WeakScaling]] = {}
    for each in comparison.weak_scaling:
        found.setdefault(each.workload, []).append(each)
    return found


def weak_scaling_sentences(comparison: Comparison, own: Sequence[WeakScaling]) -> list[str]:
    """State the throughput of each strategy with the most replicas."""
    found = []
    for each in own:
        last = each.points[-1]
        if last.throughput is None or last.efficiency is None:
            continue
        name = plain_name(comparison.row(last.configuration), comparison.rows)
        found.append(
            f"{name[0].upper()}{name[1:]} with {counted(last.replicas, 'replica')}: "
            f"{last.throughput.estimate:.2f}{TIMES} the samples/s of one replica "
            f"({bounds_in_words(last.throughput)}), efficiency {last.efficiency.estimate:.2f} "
            f"({bounds_in_words(last.efficiency)})."
        )
    return found


def _scaling_title(own: Sequence[WeakScaling]) -> str:
    samples = counted(own[0].batch_per_replica, "sample")
    return f"Weak scaling of {own[0].workload}, {samples} for each replica"


def _scaling_table(
    comparison: Comparison, own: Sequence[WeakScaling], detail: Detail, title: str = ""
) -> Table[ScalingPoint]:
    """Show each configuration once; that of one replica belongs to several strategies."""
    points = {point.configuration: point for each in own for point in each.points}
    in_order = sorted(points.values(), key=lambda point: point.replicas > 1)

    def row(point: ScalingPoint) -> Row:
        return comparison.row(point.configuration)

    def interval(value: Interval | None) -> Cell:
        if value is None or detail > Detail.NARROW:
            return interval_cell(value)
        return Cell(number(value), half_width(value))

    def ratio(value: Interval | None) -> Cell:
        if value is None:
            return Cell(NOT_MEASURED)
        if value.low == value.high == 1:
            return Cell("1")
        is_narrow = detail == Detail.NARROW
        return Cell(
            f"{value.estimate:.2f}", half_width(value) if is_narrow else f"({bounds(value)})"
        )

    columns: list[Column[ScalingPoint]] = [
        Column("configuration", lambda p: short_name(row(p), comparison.rows), "text"),
        Column("re-\nplicas", lambda p: str(p.replicas)),
        Column("global\nbatch", lambda p: str(p.global_batch)),
        Column("samples/s", lambda p: interval(p.samples_per_s)),
        Column("through-\nput", lambda p: ratio(p.throughput)),
        Column("effi-\nciency", lambda p: ratio(p.efficiency)),
        Column("s per\nstep", lambda p: interval(p.step_s), detail=Detail.WIDE),
        Column("eq.", lambda p: mark_cell(row(p))),
    ]
    return Table(
        columns=columns,
        items=in_order,
        title=title,
        style=lambda point: "soft" if point.throughput is None else "",
        gap=1,
    )


def _without_one_replica(comparison: Comparison, own: Sequence[WeakScaling]) -> list[str]:
    """Say which strategies have no efficiency, and what the run would need."""
    found = []
    for each in own:
        if each.one_replica is not None:
            continue
        last = comparison.row(each.points[-1].configuration)
        place = last.placement
        worker = counted(place.threads_per_worker, "thread")
        stages = "" if place.stages == 1 else f"{place.stages} stages of "
        found.append(
            f"{short_name(last, comparison.rows)}: no efficiency, because no equivalent "
            f"configuration with one replica of {stages}{worker} in {last.training.precision} "
            "has finished; add one to the [[trials]]"
        )
    return found


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
    return NOT_MEASURED if part.speedup is None else f"{part.speedup.estimate:.2f}{mark}"


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
