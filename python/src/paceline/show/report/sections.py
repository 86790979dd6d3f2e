"""Sections of the page about lossy training, failures, time, evaluations and the sidecar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline.analysis.compare.compression import CompressionEffect
from paceline.analysis.compare.row import Row, short_name
from paceline.analysis.compare.run import Comparison
from paceline.analysis.trial.recovery import FailureCost, failure_costs
from paceline.analysis.trial.stragglers import Staleness
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.measure.records.phases import ALL_PHASES, OTHER_SPANS
from paceline.show.report.columns import interval_cell
from paceline.show.report.section import Cell, Column, Detail, Section, Table
from paceline.show.report.wording import (
    NOT_MEASURED,
    bounds,
    mebibytes,
    megabytes,
    number,
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
