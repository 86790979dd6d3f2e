"""Sections of the page about local strategies and pipelines."""

from __future__ import annotations

from paceline.analysis.compare.row import Row, short_name
from paceline.analysis.compare.run import Comparison
from paceline.analysis.trial.phases import PipelineTimes
from paceline.analysis.trial.reading import DOT, TIMES
from paceline.show.report.columns import comparison_table
from paceline.show.report.figures.charts import stage_chart
from paceline.show.report.figures.speed import local_use_chart
from paceline.show.report.section import Column, Detail, Section, Table
from paceline.show.report.sections import of_workloads
from paceline.show.report.wording import (
    MINUS,
    NOT_MEASURED,
    megabytes,
    share,
)


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
        table=comparison_table(comparison, workload, Detail.PAGE, rows=rows),
        parts=() if use is None else (Section(charts=(use,)),),
    )


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
